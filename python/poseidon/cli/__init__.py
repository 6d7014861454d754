"""The command line: `poseidon run`, `testbed`, `server`, `bench`, `version`."""

from poseidon.cli.main import main
