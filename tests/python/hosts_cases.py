"""Runs on hosts with an sshd (ssh_hosts.py): programs, and how tests start them and see what is left of them.

`hosts` and `cleared` are fixtures: each file of tests has hosts of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssh_hosts import RIG, SshHosts, missing, ssh_hosts
from waiting import happens, wait_until

NEEDS_HOSTS = pytest.mark.skipif(bool(missing()), reason="hosts with an sshd need " + " and ".join(missing()))
MARK = f"mark-of-test-hosts-{os.getpid()}"
MANY = "1000000"  # steps
END_S = 5.0  # in which nothing runs any more
DETECTED_S = 3.0  # in which a lost host is

SUM = """
import os, sys, time
import numpy, poseidon
with poseidon.connect() as exchange:
    exchange.declare({"x": numpy.zeros(3)})
    out = numpy.zeros(3)
    exchange.push_pull("x", numpy.full(3, exchange.rank + 1.0), out=out, average=False)
    print("sum", out[0], "of", exchange.world_size, "local", os.environ["LOCAL_RANK"], flush=True)
    exchange.barrier()
"""

ENDLESS = """
import sys
import numpy, poseidon
with poseidon.connect() as exchange:
    exchange.declare({"x": numpy.zeros(3)})
    value = numpy.ones(3)
    step = 0
    while True:
        exchange.push_pull("x", value, out=value)
        step += 1
        if step == 20:
            print("runs", sys.argv[1], flush=True)
"""

TRAIN = """
import os, pathlib, signal, sys
import torch
import poseidon.torch as poseidon
steps, mode = int(sys.argv[1]), sys.argv[2]
poseidon.init()
first = not pathlib.Path("died").exists()
model = poseidon.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
recovery = poseidon.Recovery(model, optimizer, seed=0)
made = 0
while recovery.until(steps):
    with recovery.attempt():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    made += 1
    if made == 3 and mode == "kill" and poseidon.rank() == 1 and first:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if made == 5:
        print("runs", mode, flush=True)
    if made % 50 == 0:
        print("together", poseidon.world_size(), flush=True)
print("weight", sum(one.sum().item() for one in model.parameters()))
"""

SHARDED = """
import os, pathlib, signal
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import poseidon.torch as poseidon
dist.init_process_group("gloo")
poseidon.init()
first = not pathlib.Path("died").exists()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
fully_shard(model, mesh=mesh)
wrapper = poseidon.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
recovery = poseidon.Recovery(wrapper, optimizer, seed=0)
while recovery.until(8):
    with recovery.attempt():
        part = poseidon.rank() * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(100 * recovery.step + part)
        optimizer.zero_grad()
        wrapper(torch.randn(3, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    if recovery.step == 3 and poseidon.rank() == 1 and dist.get_rank() == 0 and first:
        pathlib.Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
shards = [one.to_local().double().sum().item() for one in model.parameters()]
print("shard", dist.get_rank(), "of", dist.get_world_size(), "in", poseidon.world_size(), sum(shards))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture
def cleared(hosts: SshHosts) -> None:
    hosts.clear()


def run(
    hosts: SshHosts, names: str, *words: str | Path, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = hosts.command(names, *words, options=options)
    return subprocess.run(command, cwd=hosts.work, capture_output=True, text=True, timeout=120, check=False)


def refusal(hosts: SshHosts, names: str, *words: str | Path, options: tuple[str, ...] = ()) -> str:
    done = run(hosts, names, *words, options=options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("poseidon: ")
    return done.stderr.removeprefix("poseidon: ").rstrip()


def marked() -> list[int]:
    """Processes with MARK among their arguments, on any host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def agents() -> list[int]:
    """Processes of agents on these hosts."""
    own = b"poseidon.cluster.agent"
    found = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if own in read_bytes(path).split(b"\0")]
    return [int(path.name) for path in found if RIG.encode() in read_bytes(path / "environ").split(b"\0")]


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _hear_signals() -> None:
    """Where the tests run in the background of a shell, what they start ignores these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class started:
    """A run with MARK that goes on for ever, until it is interrupted in the end. `lines` of its output so far."""

    def __init__(self, hosts: SshHosts, names: str, *words: str, env: dict[str, str] | None = None) -> None:
        self.path = hosts.folder / f"output-{time.monotonic_ns()}"
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                hosts.command(names, *words, MARK),
                cwd=hosts.work,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_hear_signals,
            )

    @property
    def text(self) -> str:
        return self.path.read_text()

    def __enter__(self) -> started:
        wait_until(lambda: f"runs {MARK}" in self.text or self.process.poll() is not None, lambda: self.text)
        assert self.process.poll() is None, self.text
        return self

    def __exit__(self, *about: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        wait_until(lambda: not marked() and not agents(), "the end of all workers")


def seconds_to_end(since: float) -> float:
    """Until no worker and no agent runs anywhere."""
    assert happens(lambda: not marked() and not agents(), 60.0)
    return time.monotonic() - since
