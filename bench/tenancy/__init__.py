"""Jobs that share a server: what `bench/tenants.py` is made of."""
