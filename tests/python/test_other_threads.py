"""What a program has beside its training is left alone: its threads, and the connections of its other libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, socket, threading, time
import torch
import poseidon.torch as poseidon
from poseidon.live import LinkMeter, own_addresses

listener = socket.create_server(("127.0.0.1", 0))
theirs = socket.create_connection(listener.getsockname())  # blocking, as a database's
socket.setdefaulttimeout(20)
poseidon.init(transport="tcp")
model = poseidon.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
meter = LinkMeter()

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()

def upload():
    raise ConnectionError("the server of metrics is away")

for number in range(6):
    if number == 2 and poseidon.rank() == 1:
        thread = threading.Thread(target=upload)
        thread.start()
        thread.join()
    step()
meter.links()
assert own_addresses() == ["127.0.0.1"]
poseidon.barrier()  # a rank that has ended has no connection
print(f"blocking {os.get_blocking(theirs.fileno())}", flush=True)

def train():
    if poseidon.rank() == 1:
        raise ValueError("bad data")
    step()

if "train" in os.environ["CASE"]:
    trainer = threading.Thread(target=lambda: [step(), train()])
    trainer.start()
    trainer.join()
"""


def run(tmp_path: Path, case: str) -> subprocess.CompletedProcess[str]:
    """Two workers."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "poseidon", "run", "-n", "2", "--flight-record", "off", str(script)]
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "CASE": case}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)


def test_the_end_of_a_thread_that_exchanges_nothing_ends_no_job(tmp_path: Path) -> None:
    done = run(tmp_path, "upload")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the server of metrics is away" in done.stderr
    assert done.stdout.count("blocking True") == 2


def test_the_end_of_a_thread_that_trains_ends_the_job(tmp_path: Path) -> None:
    done = run(tmp_path, "train")
    assert "Aborted: rank 1 on" in done.stderr  # what rank 0's thread got
    assert "rank 1 failed: ValueError: bad data" in done.stderr
