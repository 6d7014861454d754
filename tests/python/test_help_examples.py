"""Every command's help shows an example: it parses, and what takes seconds and needs no root runs as printed.

The rest runs where SLOW_EXAMPLES is set, as `make test-frameworks` does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import flight_records
from poseidon.cli.main import app
from waiting import end, wait_until

ROOT = typer.main.get_command(app)

# What `train.py` of the examples is here: it must know what it is given.
SCRIPT = """
import sys
import numpy, poseidon
value = numpy.zeros(4, numpy.float32)
with poseidon.connect() as exchange:
    exchange.declare({"value": value})
    value[:] = exchange.rank + 1
    exchange.push_pull("value", value)
print("mean", value[0], sys.argv[1:])
"""


def commands(command: Any = ROOT, parent: Any = None) -> Iterator[tuple[str, Any]]:
    """All commands, with the names that lead to each."""
    context = command.context_class(command, info_name=command.name if parent else "poseidon", parent=parent)
    yield context.command_path, command
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), context)


def examples(command: Any) -> list[str]:
    """The command lines in the text below a command's help."""
    paragraphs = (paragraph.removeprefix("Example: ") for paragraph in (command.epilog or "").split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph.startswith("poseidon ")]


EXAMPLES = sorted({example for _, command in commands() for example in examples(command)})


@pytest.mark.parametrize(("path", "command"), [pytest.param(*found, id=found[0]) for found in commands()])
def test_help_shows_an_example_of_the_command_itself(path: str, command: Any) -> None:
    first = (command.epilog or "").split("\n\n")[0]
    assert first.startswith(f"Example: {path} ") or first == f"Example: {path}"


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_parses(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    if example.endswith("--help"):
        pytest.skip("help is shown while it is parsed")
    monkeypatch.setattr(ROOT.context_class, "invoke", lambda self, *_, **__: called.append(self.command_path))
    ROOT.main(shlex.split(example)[1:], prog_name="poseidon", standalone_mode=False)
    assert called
    assert example.startswith(called[-1])


def run(example: str, directory: Path) -> str:
    """What an example prints, run by a shell; AssertionError if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        example, shell=True, cwd=directory, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f"{example} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# An example, and what it prints. Places that an example names are made below.
RUN = {
    "poseidon run -n 4 train.py": r"mean 2\.5 \[\]",
    "poseidon options --json": r'"name": "chunk_bytes"',
    "poseidon features --json": r'"written": "stragglers=drop"',
    "poseidon version --json": r'"poseidon": "\d',
    "poseidon simulate VGG19-22K --hosts 1024 --link 25gbit --trace step.json": r"a step takes",
    "poseidon testbed status --json": r"^\[",
    "poseidon doctor /tmp/poseidon-default-rank*.json": r"rank 2",
    "poseidon bench train --help": r"Example: poseidon bench train",
    "poseidon bench paper parameter-hub --json": r'"what": "ResNet 269, CC',
}
SLOW = {
    "poseidon plan VGG19 --hosts 4 --link 1gbit": r"4 hosts on 1gbit",
    "poseidon bench priority cost --chunks 320 --chunks 1000000": r"1,?000,?000",
    "poseidon run -n 4 --link 100mbit --chunk-bytes 1MiB train.py --epochs 3": r"mean 2\.5 \['--epochs', '3'\]",
    "poseidon bench train --model VGG19 --hosts 8 --link 156.25mbit --scale 4 --compute 3.6 --methods poseidon,ddp": (
        r"efficiency"
    ),
}
NEEDS_ROOT = ("--link 100mbit", "bench train --model")


def test_every_example_that_is_run_is_printed() -> None:
    assert {*RUN, *SLOW} <= set(EXAMPLES)


@pytest.mark.parametrize("example", [*RUN, *SLOW])
def test_it_runs_as_printed(example: str, tmp_path: Path) -> None:
    if example in SLOW and "SLOW_EXAMPLES" not in os.environ:
        pytest.skip("takes long: SLOW_EXAMPLES=1")
    if any(part in example for part in NEEDS_ROOT) and os.geteuid() != 0:
        pytest.skip("needs root")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    flight_records.write(tmp_path, *(flight_records.record(rank, "noticed", about=2) for rank in (0, 1, 3)))
    printed = run(example.replace("/tmp/", f"{tmp_path}/"), tmp_path)
    assert re.search(RUN.get(example) or SLOW[example], printed), printed


@pytest.mark.skipif("SLOW_EXAMPLES" not in os.environ or os.geteuid() != 0, reason="makes network namespaces")
def test_a_testbed_comes_and_goes(tmp_path: Path) -> None:
    up = next(example for example in EXAMPLES if example.startswith("poseidon testbed up"))
    made = re.search(r"testbed (?:number )?(\d+)|down (\d+)", run(up, tmp_path))
    assert made is not None
    run(f"poseidon testbed down {made[1] or made[2]}", tmp_path)


@contextlib.contextmanager
def serving(example: str, ports: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Changes ports, which another process may have, in the example of a server and in those that talk to it."""

    def changed(text: str) -> str:
        return re.sub(r"\b70\d0\b", lambda port: ports[port[0]], text)

    command = [sys.executable, "-m", *shlex.split(changed(example))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield changed
        assert process.wait(10) == 0
    finally:
        end(process)


def test_a_server_is_started_watched_and_drained(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = dict(zip(("7000", "7070"), (str(one.getsockname()[1]) for one in sockets), strict=True))
    with serving("poseidon server --port 7000 --admin 7070", ports) as changed:

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(ports["7070"])), 1):
                return True
            return False

        wait_until(listens, "the server's admin port")
        assert '"jobs": []' in run(changed("poseidon server jobs --admin 127.0.0.1:7070 --json"), tmp_path)
        run(changed("poseidon server drain --admin 127.0.0.1:7070"), tmp_path)
