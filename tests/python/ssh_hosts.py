"""Hosts in network namespaces, each with an sshd, a working directory and shared memory of its own.

One more, that is none of them, starts runs on them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.testbed import Testbed, missing_requirements
from waiting import wait_until

# In the environment of all that these hosts run: other tests may have hosts of their own at the same time.
RIG = f"SSH_HOSTS_OF={os.getpid()}"
NAMES = ("a", "b", "c", "d")


def missing() -> list[str]:
    """What this machine lacks for them."""
    return [*missing_requirements(), *(one for one in ("sshd", "ssh-keygen") if _program(one) is None)]


def _program(name: str) -> str | None:
    return shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")


# What a host's sshd and all that it starts see: own shared memory, and in `work` the files of host_NAME.
_OWN_FILES = """
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" "$2"
shift 2
exec "$@"
"""


@dataclass
class SshHosts:
    """Hosts `NAMES`, and one more, where commands are started that reach them by `ssh`."""

    testbed: Testbed
    folder: Path

    @property
    def work(self) -> Path:
        """The working directory by the name that all hosts have for theirs. Here it is that of the one more."""
        return self.folder / "work"

    def work_of(self, name: str) -> Path:
        """That of a host."""
        return self.folder / f"host_{name}"

    def write(self, name: str, text: str, hosts: Sequence[str] = NAMES) -> Path:
        """A file in the working directory of these hosts and of the one more."""
        for folder in (self.work, *(self.work_of(host) for host in hosts)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return self.work / name

    def clear(self) -> None:
        """Removes what is in all working directories."""
        for folder in (self.work, *map(self.work_of, NAMES)):
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def ssh(self) -> str:
        """The ssh command that knows the hosts, their keys and how to log in."""
        return f"ssh -F {self.folder / 'config'}"

    def command(self, hosts: str, *words: str | Path, options: Sequence[str] = ()) -> list[str]:
        """`poseidon run --hosts` on the machine that is none of them."""
        run = [sys.executable, "-m", "poseidon", "run", "--hosts", hosts, "--ssh", self.ssh, *options]
        return self.testbed.command(len(NAMES), [*run, *map(str, words)])

    def on(self, name: str, *words: str) -> None:
        """Runs a command in a host's network."""
        subprocess.run(self.testbed.command(NAMES.index(name), words), check=True)


@contextlib.contextmanager
def ssh_hosts(folder: Path, link: str = "1gbit") -> Iterator[SshHosts]:
    """Needs root, iproute2 and sshd."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    with Testbed(len(NAMES) + 1, link) as testbed, contextlib.ExitStack() as stack:
        hosts = SshHosts(testbed, folder)
        _write_configurations(hosts)
        hosts.work.mkdir()
        for index, name in enumerate(NAMES):
            hosts.work_of(name).mkdir()
            own = ["unshare", "-m", "--propagation", "private", "sh", "-ec", _OWN_FILES, "sh"]
            places = [str(hosts.work_of(name)), str(hosts.work)]
            daemon = [_program("sshd") or "", "-D", "-e", "-f", str(folder / "sshd_config")]
            log = stack.enter_context((folder / f"sshd_{name}.log").open("wb"))
            process = subprocess.Popen(testbed.command(index, [*own, *places, *daemon]), stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for name in NAMES:
            wait_until(lambda log=folder / f"sshd_{name}.log": b"listening" in log.read_bytes(), "sshd")
        yield hosts


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _write_configurations(hosts: SshHosts) -> None:
    folder = hosts.folder
    key = (folder / "host_key.pub").read_text().split()[:2]
    addresses = [host.address for host in hosts.testbed.hosts]
    (folder / "known_hosts").write_text("".join(f"{address} {' '.join(key)}\n" for address in addresses))
    (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\n"
        f"UsePAM no\nSetEnv {RIG}\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
    )
    lines = [
        f"IdentityFile {folder}/user_key",
        f"UserKnownHostsFile {folder}/known_hosts",
        "IdentitiesOnly yes",
        "StrictHostKeyChecking yes",
    ]
    for name, address in zip(NAMES, addresses, strict=False):
        lines += [f"Host {name}", f"  HostName {address}"]
    (folder / "config").write_text("\n".join(lines) + "\n")
