"""What an agent finds out about its machine before a run, in a fraction of a second."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from poseidon import live
from poseidon.check.interfaces import interfaces
from poseidon.launch.environment import free_port
from poseidon.options import available_cpu_count
from poseidon.version import VERSION

_MOST_SHARDS = 64  # of a model on one machine
_DEVICES = ("nvidia[0-9]*", "kfd", "accel/accel*", "dri/renderD*")  # of which torch may have an accelerator
_COUNT = """
import torch
accelerator = getattr(torch, "accelerator", None)
print(accelerator.device_count() if accelerator else torch.cuda.device_count())
"""


def facts(folder: str, files: Sequence[str], counts_accelerators: bool) -> dict[str, Any]:
    """`folder`: of the run. `files`: whose digests are wanted, relative to it or absolute."""
    return {
        "poseidon": VERSION,
        "python": platform.python_version(),
        "torch": _version_of("torch"),
        "machine": machine_identity(),
        "memory": memory_identity(),
        "addresses": _addresses(),
        "cores": available_cpu_count(),
        "accelerators": _accelerators() if counts_accelerators else 0,
        "time": time.time(),
        "ports": {"run": free_port(), "before": free_port(), "shards": free_port(_MOST_SHARDS)},
        "free_bytes": _free_bytes(),
        "has_folder": Path(folder).is_dir(),
        "digests": {name: digest(Path(folder, name)) for name in files},
    }


def digest(path: Path) -> str | None:
    """Of a file's content; None where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def machine_identity() -> str:
    """Equal for two processes that share a machine and its network."""
    return f"{_boot()} {os.stat('/proc/self/ns/net').st_ino}"


def memory_identity() -> str:
    """Equal for two processes that see each other's figures (live.py)."""
    return f"{_boot()} {live.place()}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _addresses() -> list[str]:
    """At which others may reach this machine. First the one at which the launcher has."""
    words = os.environ.get("SSH_CONNECTION", "").split()  # from: address and port, to: address and port
    reached = [words[2]] if len(words) == 4 else []
    found = dict.fromkeys([*reached, *(address for one in interfaces() for address in one.addresses)])
    return [address for address in found if not address.startswith(("127.", "::1", "fe80:"))]


def _accelerators() -> int:
    """Of this machine, as torch counts them, which takes seconds where there may be some."""
    if not any(found for pattern in _DEVICES for found in Path("/dev").glob(pattern)):
        return 0
    counted = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(counted.stdout) if counted.returncode == 0 and counted.stdout.strip().isdecimal() else 0


def _free_bytes() -> int:
    """Where temporary files go: the least that the run's own files need."""
    there = os.statvfs(tempfile.gettempdir())
    return there.f_bavail * there.f_frsize


TOKEN_BYTES = 16
_PATIENCE_S = 2.0


class Doorbell:
    """Answers every connection that sends the run's token, so that others learn whether they reach this machine."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0)) if not socket.has_ipv6 else _of_both_versions()
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._token = b""

    def expect(self, token: bytes) -> None:
        """From now on."""
        self._token = token

    def fileno(self) -> int:
        """For a selector: readable when somebody rings."""
        return self._socket.fileno()

    def answer(self) -> None:
        """Answers one."""
        with contextlib.suppress(OSError):
            visitor, _ = self._socket.accept()
            with visitor:
                visitor.settimeout(_PATIENCE_S)
                if _received(visitor) == self._token:
                    visitor.sendall(self._token)

    def close(self) -> None:
        """Answers nobody any more."""
        self._socket.close()


def _of_both_versions() -> socket.socket:
    try:
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except OSError:  # the kernel does without IPv6
        return socket.create_server(("", 0))


def reaches(address: str, port: int, token: bytes) -> bool:
    """Whether the machine there is of this run."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), _PATIENCE_S) as visitor:
        visitor.sendall(token)
        return _received(visitor) == token
    return False


def _received(visitor: socket.socket) -> bytes:
    data = b""
    while len(data) < TOKEN_BYTES and (piece := visitor.recv(TOKEN_BYTES - len(data))):
        data += piece
    return data
