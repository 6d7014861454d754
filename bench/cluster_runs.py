"""How long a run on four hosts takes to start, and how soon nothing of it is left, by each way to end it.

The hosts are namespaces of this machine with a real sshd each (tests/python/ssh_hosts.py). Needs root, iproute2 and
openssh-server.

    python bench/cluster_runs.py --times 5
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

from ssh_hosts import NAMES, SshHosts, missing, ssh_hosts  # noqa: E402
from waiting import happens, wait_until  # noqa: E402

_MARK = "mark-of-cluster-runs"
_AGENT = "poseidon.cluster.agent"
_FIRST_STEP = """
import os, sys, time
begin = time.time()
import torch, torch._dynamo
import poseidon.torch as poseidon
imported = time.time() - begin
poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while True:
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        print("first", time.time() - float(os.environ["HF_BEGAN"]) - imported, flush=True)
    step += 1
"""


def processes() -> list[int]:
    """Workers and agents of these runs, on any host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if (_MARK in words or _AGENT in words) and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def run_once(hosts: SshHosts, end: Callable[[subprocess.Popen[str]], None]) -> tuple[float, float]:
    """Seconds to the slowest first step, beyond its imports, and from `end` until nothing runs anywhere."""
    command = hosts.command(",".join(NAMES), "train.py", _MARK)
    process = subprocess.Popen(
        command,
        cwd=hosts.work,
        env={**os.environ, "HF_BEGAN": str(time.time())},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    firsts = [float(line.split()[-1]) for _, line in zip(NAMES, _firsts(process.stdout), strict=False)]
    since = time.monotonic()
    end(process)
    assert happens(lambda: not processes(), 60.0), "something is left"
    seconds = time.monotonic() - since
    process.kill()
    process.wait()
    return max(firsts), seconds


def _firsts(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if "] first " in line)


def _ways(hosts: SshHosts) -> dict[str, Callable[[subprocess.Popen[str]], None]]:
    def loses_a_host(process: subprocess.Popen[str]) -> None:
        hosts.on("c", "ip", "link", "set", "eth0", "down")

    return {
        "Ctrl-C": lambda process: process.send_signal(signal.SIGINT),
        "a closed terminal": lambda process: process.send_signal(signal.SIGHUP),
        "a killed launcher": lambda process: process.send_signal(signal.SIGKILL),
        "a lost host": loses_a_host,
    }


def _told(name: str, values: Sequence[float]) -> None:
    middle = statistics.median(values)
    print(f"{name:44} {middle:5.2f} s   ({min(values):.2f} to {max(values):.2f}, {len(values)} runs)", flush=True)


def main() -> None:
    """Prints the median and the range of each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="runs for each way to end")
    times = parser.parse_args().times
    if lacks := missing():
        sys.exit(f"this needs {' and '.join(lacks)}")
    with tempfile.TemporaryDirectory() as folder, ssh_hosts(Path(folder)) as hosts:
        hosts.write("train.py", _FIRST_STEP)
        starts: list[float] = []
        for name, end in _ways(hosts).items():
            ends = []
            for _ in range(times):
                start, seconds = run_once(hosts, end)
                starts.append(start)
                ends.append(seconds)
                if name == "a lost host":
                    hosts.on("c", "ip", "link", "set", "eth0", "up")
                    _wait_for_host(hosts)
            _told(f"nothing runs any more after {name}", ends)
        _told("from the command to the first step", starts)


def _wait_for_host(hosts: SshHosts) -> None:
    """Until it can be reached again."""
    command = hosts.testbed.command(len(NAMES), [*hosts.ssh.split(), "c", "true"])
    wait_until(lambda: subprocess.run(command, check=False, capture_output=True).returncode == 0, "the host")


if __name__ == "__main__":
    main()
