"""`poseidon bench`: benchmarks that a user runs with the installed package, on any cluster or testbed.

Experiments that need the repository, and judge the figures of docs/benchmarks.md, are the programs in bench/.
"""
