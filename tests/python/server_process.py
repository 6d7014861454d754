"""A dedicated server as a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def server_process(*arguments: str, stderr: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `poseidon server` on loopback and its address; killed in the end."""
    command = [sys.executable, "-m", "poseidon", "server", "--interfaces", "127.0.0.1", "--json", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline()
            assert line, "the server ended before it printed its address"
            text += line
        yield process, json.loads(text)["address"]
    finally:
        process.kill()
        process.wait()
