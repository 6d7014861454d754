"""A Slurm of this machine alone: one controller and two nodes, with keys and files of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from poseidon.launch import free_port
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
NODES = ("127.0.0.1", "127.0.0.2")  # names that are addresses need no name service
START_S = 60

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.[1-2] Port=[{first},{second}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `srun` finds the cluster. Needs root."""
    (folder / "state").mkdir()
    ports = {name: free_port() for name in ("controller", "first", "second")}
    configuration = folder / "slurm.conf"
    configuration.write_text(_CONFIGURATION.format(host=socket.gethostname(), folder=folder, **ports))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = [f"--{name}={folder / file}" for name, file in (("key-file", "key"), ("socket", "munge.socket"))]
    munge += [f"--{name}={folder / name}" for name in ("pid-file", "log-file", "seed-file")]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            output = stack.enter_context((folder / f"{len(list(folder.iterdir()))}-{command[0]}.txt").open("w"))
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            stack.callback(_end, process)
            if command[0] == "munged":
                _wait_until((folder / "munge.socket").exists, folder)
        _wait_until(lambda: _idle_nodes(environment) == len(NODES), folder)
        yield environment


def _idle_nodes(environment: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=START_S, check=False
    )
    return done.stdout.split().count("idle")


def _wait_until(condition: Callable[[], bool], folder: Path) -> None:
    def told() -> str:
        return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.txt"))

    wait_until(condition, lambda: f"Slurm to start:\n{told()}", START_S, every=0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
