"""A small Debian without a compiler in a folder, whose systemd is booted in namespaces of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from waiting import happens, wait_until

SUITE = "bookworm"
PACKAGES = "systemd,dbus,python3,python3-venv,iproute2,libssl3,ca-certificates"
PYTHON = (3, 11)  # the suite's
CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))

# Runs as the first process of new namespaces. Systemd needs the usual mounts, and mounts that reach its services.
BOOT = r"""
set -eu
cd "$1"
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s /proc/self/fd dev/fd
ln -s pts/ptmx dev/ptmx
ip link set lo up
mkdir -p outside
pivot_root . outside
umount -l /outside
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=no
"""


def missing() -> str:
    """What is needed and not here, or nothing."""
    if os.geteuid() != 0:
        return "root"
    if sys.version_info[:2] != PYTHON:
        return "Python {}.{}".format(*PYTHON)
    if not any((folder / "cgroup.procs").exists() for folder in CGROUPS):
        return "cgroup2"
    tools = ("debootstrap", "unshare", "nsenter", "pivot_root")
    return ", ".join(tool for tool in tools if shutil.which(tool) is None)


def make_root(folder: Path, packages: str = PACKAGES) -> None:
    """Installs Debian into a folder."""
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Machine:
    """A booted one. `init` is its first process, seen from here."""

    def __init__(self, init: int) -> None:
        self._init = init

    def run(self, command: str, check: bool = True) -> str:
        """What a shell command prints there."""
        enter = ["nsenter", "-t", str(self._init), "-a", "-r", "-w", "bash", "-c", command]
        return subprocess.run(enter, check=check, capture_output=True, text=True, timeout=60).stdout

    def from_outside(self, command: list[str]) -> list[str]:
        """A command that runs this machine's programs on that one's network."""
        return ["nsenter", "-t", str(self._init), "-n", *command]

    def wait(self, command: str, expected: str, seconds: float = 30.0) -> None:
        """Waits until a command prints this. Raises AssertionError with what it prints instead."""

        def told() -> str:
            return self.run(command, check=False).strip()

        wait_until(lambda: told() == expected, lambda: f"{expected!r} of {command}: {told()}", seconds, every=0.2)


@contextlib.contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """Boots the Debian in `root`; all its processes are ended in the end."""
    group = next(folder for folder in CGROUPS if (folder / "cgroup.procs").exists()) / f"debian-{os.getpid()}"
    group.mkdir()
    namespaces = "--pid --mount --uts --ipc --net --cgroup --propagation private --fork --kill-child"
    inside = shlex.join(["unshare", *namespaces.split(), "bash", "-c", BOOT, "boot", str(root)])
    process = subprocess.Popen(["bash", "-c", f"echo $$ >{group}/cgroup.procs && exec {inside}"])
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        machine = Machine(_first_child(children))
        machine.wait("systemctl is-system-running | sed s/degraded/running/", "running")
        yield machine
    finally:
        process.kill()
        process.wait()
        _remove(group)


def _first_child(children: Path) -> int:
    """Waits until systemd is the process: before, the mounts are being made."""

    def systemd() -> int | None:
        names = {int(child): Path(f"/proc/{child}/comm").read_text().strip() for child in children.read_text().split()}
        return next((child for child, name in names.items() if name == "systemd"), None)

    return wait_until(systemd, "systemd to be started", 10)


def _remove(group: Path) -> None:
    """The processes in it end when their namespace's first has ended."""

    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            for inner in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                inner.rmdir()
            group.rmdir()
        return not group.exists()

    happens(is_gone, 5, every=0.1)
