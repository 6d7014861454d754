"""`python -m poseidon` is the `poseidon` command."""

from poseidon.cli import main

main()
