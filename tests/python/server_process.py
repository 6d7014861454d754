"""A dedicated server as a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from waiting import end


@contextlib.contextmanager
def server_process(*arguments: str, stderr: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `poseidon server` on loopback and its address; killed in the end."""
    with started_server("--interfaces", "127.0.0.1", *arguments, stderr=stderr) as (process, start):
        yield process, start["address"]


@contextlib.contextmanager
def started_server(
    *arguments: str, stderr: int | None = None, before: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A `poseidon server` and what it prints at its start; killed in the end. `before`: a command that runs it."""
    command = [*before, sys.executable, "-m", "poseidon", "server", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "the server ended before it printed its address"
            text += line
        yield process, json.loads(text)
    finally:
        end(process)
