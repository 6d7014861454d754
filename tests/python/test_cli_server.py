"""`poseidon server` with its options, used by real workers."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import poseidon
import workers
from poseidon.errors import PoseidonError
from poseidon.launch import free_port
from poseidon.launch.environment import own_job_name
from server_process import server_process
from waiting import IN_PROGRAMS

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
LISTENING = "0A"  # a socket's state in /proc/net/tcp


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """The address and process id of a `poseidon server` that ends well when it is told to."""
    with server_process(*arguments) as (process, address):
        yield address, process.pid
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=20) == 0


def test_server_serves_until_interrupted() -> None:
    with server_process() as (process, address):
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_server_ends_when_signals_interrupt_each_other() -> None:
    with server_process() as (process, _):
        for number in range(2000):
            process.send_signal((signal.SIGINT, signal.SIGTERM)[number % 2])
        assert process.wait(timeout=20) in (0, -signal.SIGINT, -signal.SIGTERM)


def test_server_that_was_stopped_goes_on() -> None:
    with serving() as (address, process_id):
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(1.2)  # it waits for a signal for 1 s at a time, and must be stopped for longer
        os.kill(process_id, signal.SIGCONT)
        with poseidon.connect(servers=[address], rank=0, world_size=1, timeout=20) as exchange:
            exchange.declare({"w": np.zeros(10)})
            exchange.push_pull("w", np.ones(10))


def listening_ports(process_id: int) -> list[int]:
    """TCP ports that the process listens on."""
    links = [os.readlink(path) for path in Path(f"/proc/{process_id}/fd").iterdir()]
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for line in Path(f"/proc/{process_id}/net/tcp").read_text().splitlines()[1:]]
    return sorted(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENING and row[9] in inodes)


def sums(port: int, address: str, assignment: str) -> None:
    """Whole numbers, whose sum does not depend on the order of adding; in gradient mode, which all servers know."""
    from poseidon._core import Client, Layer
    from poseidon.options import resolve

    given = {"servers": [address], "assignment": assignment, "master_port": port, "chunk_bytes": 4096, "timeout": 20}
    client = Client.connect(resolve(**given).core())
    size = client.world_size
    layer, _ = client.add_layers([Layer("w", "float32", 50_000, scheme="ps")])
    for step in range(3):
        array = np.full(50_000, client.rank + step, "float32")
        client.start(layer, array, 1)
        client.wait(layer)
        assert np.all(array == size * (size - 1) // 2 + size * step)
    client.shutdown()


def updates(port: int, address: str) -> None:
    with poseidon.connect(servers=[address], master_port=port, chunk_bytes=4096, timeout=20) as exchange:
        exchange.declare({"w": np.full(50_000, 3.0)})
        exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=1.0))
        array = np.ones(50_000)
        exchange.push_pull("w", array)
        assert np.all(array == 2)


@pytest.mark.parametrize(
    ("cores", "aggregation", "reduce_order", "assignment", "ports"),
    [
        (1, "streaming", "rank", "chunk", 1),
        (3, "at_once", "arrival", "worker", 3),
        (2, "streaming", "arrival", "chunk", 2),
        (2, "wide", "rank", "chunk", 1),  # its threads share every chunk
    ],
)
def test_workers_use_a_server_with_options(
    cores: int, aggregation: str, reduce_order: str, assignment: str, ports: int
) -> None:
    arguments = ["--server-cores", str(cores), "--aggregation", aggregation, "--reduce-order", reduce_order]
    with serving(*arguments, "--assignment", assignment, "--compute-threads", "2") as (address, process_id):
        assert len(listening_ports(process_id)) == ports
        workers.run(2, sums, free_port(), address, assignment)
        if assignment == "chunk":  # the baseline keeps no values
            workers.run(2, updates, free_port(), address)


def is_left_waiting(port: int, address: str) -> tuple[float, str]:
    began = time.monotonic()
    try:
        with poseidon.connect(servers=[address], master_port=port, timeout=30) as exchange:
            exchange.declare({"w": np.zeros(10)})
            if exchange.rank == 0:
                exchange.push("w", np.zeros(10))
    except PoseidonError as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, "nothing failed"


def test_the_server_has_its_own_timeout_and_names_who_is_missing() -> None:
    with serving("--timeout", "2") as (address, _):
        answers = workers.run(2, is_left_waiting, free_port(), address)
    for seconds, text in answers:
        assert 1 < seconds < 10
        assert "rank 1" in text
        assert "layer 'w'" in text


def two_free_ports() -> int:
    """The lower of two neighbouring ports, below those that Linux gives to outgoing connections."""
    for port in random.sample(range(20000, 30000, 2), 100):
        with socket.socket() as lower, socket.socket() as upper, contextlib.suppress(OSError):
            lower.bind(("127.0.0.1", port))
            upper.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two neighbouring ports are free")


def test_cores_take_ports_in_a_row() -> None:
    port = two_free_ports()
    with serving("--port", str(port), "--server-cores", "2") as (address, process_id):
        assert address == f"127.0.0.1:{port}"
        assert listening_ports(process_id) == [port, port + 1]


def test_a_wrong_option_is_one_line() -> None:
    command = [sys.executable, "-m", "poseidon", "server", "--aggregation", "tall"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"poseidon: --aggregation is 'tall': it must be one of .*\n", done.stderr)


MEETING = """
import pathlib
import numpy as np
import poseidon

here, there = (pathlib.Path(path) for path in sys.argv[1:])
with poseidon.connect(chunk_bytes=4096, timeout=20) as exchange:
    exchange.declare({"w": np.zeros(10)})
    exchange.push_pull("w", np.ones(10))
    here.touch()
    wait_for(there)
    exchange.push_pull("w", np.ones(10))
"""


def name_on_the_servers(run: subprocess.Popen[str]) -> str:
    _, error = run.communicate(timeout=60)
    assert run.returncode == 0, error
    match = re.search(r"on the servers this job is '([^']+)'", error)
    assert match, error
    return match[1]


def test_runs_that_give_no_name_share_a_server(tmp_path: Path) -> None:
    script, a, b = tmp_path / "my train.py", tmp_path / "a", tmp_path / "b"
    script.write_text(IN_PROGRAMS + MEETING)
    with serving() as (address, _):

        def start(*files: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "poseidon", "run", "--servers", address, str(script), *map(str, files)]
            return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        both = [start(a, b), start(b, a)]
        first, second = (name_on_the_servers(run) for run in both)
        assert first != second
        assert re.fullmatch(r"my-train-[0-9a-f]{8}", first)
        assert name_on_the_servers(start(a, b)) == first, "so that it finds its checkpoints"


def test_a_name_that_was_given_stays() -> None:
    command = ["python", "train.py"]
    servers = {"POSEIDON_SERVERS": "10.0.0.1:7000"}
    assert own_job_name(command, {}) is None, "nobody shares the servers of its own workers"
    assert own_job_name(command, servers) is not None
    assert own_job_name(command, {**servers, "POSEIDON_JOB": "default"}) is None
