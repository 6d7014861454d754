"""The environment of each worker of a run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from poseidon.errors import InvalidArgument
from poseidon.options import BY_NAME, available_cpu_count, fresh_run, fresh_secret, is_given, resolve_option
from poseidon.options.secret import VARIABLE as SECRET_VARIABLE
from poseidon.testbed import HOST_DEVICE, Testbed

_NAME_LENGTH = 32  # of the script's name in a job's
# Below the ports that Linux gives to outgoing connections, one of which could otherwise take the port first.
_PORTS = range(20000, 30000)
# Processes that have seeded Python's generator alike, as programs do at their start, would all try the same ports.
_SEEDLESS = random.SystemRandom()


def free_port(count: int = 1) -> int:
    """A TCP port that nothing on this machine listens on now, and so are the `count` - 1 ports after it."""
    for port in _SEEDLESS.sample(_PORTS[: len(_PORTS) - count], 100):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for one in range(port, port + count):
                probes.enter_context(socket.socket()).bind(("", one))
            return port
    raise InvalidArgument(f"no free port found from {_PORTS[0]} to {_PORTS[-1]}: give one with --master-port")


def environments_of(
    count: int, variables: Mapping[str, str], testbed: Testbed | None, master_port: int | None
) -> list[dict[str, str]]:
    """The environment of each rank."""
    shared = {**os.environ, **variables}
    if BY_NAME["secret_file"].variable in variables:  # which beats a secret that was there before
        shared.pop(SECRET_VARIABLE, None)
    if not is_given("replica", shared):  # otherwise workers that others start belong to the same job
        shared.update(fresh_secret(shared))
        shared.update(fresh_run())
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # there is no agent: rank 0 serves the store
    shared.setdefault("OMP_NUM_THREADS", str(max(1, available_cpu_count() // count)))
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if testbed is not None:
        # A host has one device and no name service; Gloo would look up the machine's name.
        shared.setdefault("GLOO_SOCKET_IFNAME", HOST_DEVICE)
        port = master_port or _SEEDLESS.choice(_PORTS)
    else:
        port = master_port or free_port()
    shared["MASTER_ADDR"] = testbed.hosts[0].address if testbed else "127.0.0.1"
    shared["MASTER_PORT"] = str(port)
    shared["WORLD_SIZE"] = shared["LOCAL_WORLD_SIZE"] = str(count)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def own_job_name(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """A name for the job of a run on dedicated servers, which other jobs share. None if the job needs none.

    It has the script's name and a digest of what was started, by whom and where. So jobs that run at the same time do
    not meet, and one that is started again finds its checkpoints.
    """
    if not resolve_option("servers", environment) or is_given("job", environment):
        return None
    script = next((Path(part).stem for part in command if part.endswith(".py")), Path(command[0]).name)
    about = "\0".join([socket.gethostname(), str(os.getuid()), str(Path.cwd()), *command])
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script)[:_NAME_LENGTH]
    return f"{stem}-{hashlib.sha256(about.encode(errors='surrogateescape')).hexdigest()[:8]}"
