"""Updates as part of the exchange, on workers or on servers."""
