"""Benchmarks of training: replayed networks on shaped ports, real convergence, overhead of one worker."""
