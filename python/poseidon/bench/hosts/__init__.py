"""One process per host: what all benchmarks need to run on a machine that plays a cluster."""
