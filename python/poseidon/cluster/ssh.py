"""The command that starts an agent by ssh, and what a failure of it means."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from poseidon.errors import InvalidArgument

_AGENT = "poseidon.cluster.agent"
_CONNECT_S = 5
_ALIVE_S, _ALIVE_COUNT = 1, 3  # as the failure detector's three seconds (docs/recovery.md)
_FAILED = 255  # ssh itself; other statuses are the agent's
_NOT_FOUND = (126, 127)
# A password or a question would be asked once for each machine, and by all at the same time.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ServerAliveInterval": str(_ALIVE_S),
    "ServerAliveCountMax": str(_ALIVE_COUNT),
    "ControlPath": "none",
    "ForwardX11": "no",
    "ForwardAgent": "no",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "LogLevel": "ERROR",
}


def ssh_options() -> list[str]:
    """Those that count unless the user has set others."""
    return [f"-o{name}={value}" for name, value in _OPTIONS.items()]


def ssh_command(ssh: str, host: str, python: str) -> list[str]:
    """`ssh`: the program and options of the user's own, as a shell splits them. They come first, so they count."""
    agent = f"cd / && exec {shlex.quote(python)} -u -m {_AGENT}"
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise InvalidArgument(f"--ssh {ssh}: {error}: give the command and its options, as to a shell") from None
    return [*words, *ssh_options(), host, f"exec sh -c {shlex.quote(agent)}"]


def why_it_failed(host: str, python: str, status: int, lines: Sequence[str]) -> str:
    """A sentence about an agent that has not answered. `lines`: what ssh and the machine have written."""
    text = "\n".join(lines)
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {status}")
    if status == _FAILED:
        return _why_ssh_failed(host, text, last)
    if status in _NOT_FOUND:
        return (
            f"host {host} has no Python at {python}: install the same environment there, or name its path by --python"
        )
    if "No module named" in text and "poseidon" in text:
        return f"the Python of host {host}, {python}, has no Poseidon of this version: install it there ({last})"
    return f"host {host} cannot start workers: {last}"


def _why_ssh_failed(host: str, text: str, last: str) -> str:
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        return f"host {host} has another key than known_hosts has for it: compare it, then ssh-keygen -R {_bare(host)}"
    if "Host key verification failed" in text:
        return f"the key of host {host} is not known here: compare it once, by ssh {host}"
    if "Permission denied" in text or "Too many authentication failures" in text:
        return f"host {host} would ask for a password: let your key in by ssh-copy-id {host}, or start an ssh-agent"
    if "Could not resolve hostname" in text:
        return f"no host is called {host}: mend the name, or add it to /etc/hosts"
    return f"host {host} cannot be reached by ssh: {last}"


def _bare(host: str) -> str:
    return host.rpartition("@")[2]
