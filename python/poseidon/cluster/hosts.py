"""The machines of a run, as `--hosts` names them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import InvalidArgument

_FORM = "write --hosts a,b,c:2, or the name of a file with a line for each machine, such as 'a slots=2'"
_MOST_SHOWN = 40
_SLOTS = ("slots", "max_slots", "max-slots")  # Open MPI and DeepSpeed; the first counts
# [IPv6 address]:workers, or a name, with a user or not, and :workers.
_WITH_BRACKETS = re.compile(r"((?:[^@\s\[\]]+@)?)\[([0-9A-Fa-f:.%\w]+)\](?::(.*))?")


@dataclass(frozen=True)
class Host:
    """A machine, by the name that ssh takes. `workers`: how many; None: one for each accelerator, and at least one."""

    name: str
    workers: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """The machines, in the order of their ranks. Raises InvalidArgument, also for a machine that stands twice."""
    path = Path(text)
    if os.path.isfile(text):  # which knows that a long text is none
        hosts = list(_of_file(path))
    elif "/" in text:
        raise InvalidArgument(f"there is no file of hosts {text}: {_FORM}")
    else:
        hosts = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if not hosts:
        raise InvalidArgument(f"no host is given: {_FORM}")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"host {name} is given {names.count(name)} times: name it once, as {name}:WORKERS")
    return hosts


def _of_file(path: Path) -> Iterator[Host]:
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InvalidArgument(f"the file of hosts {path} cannot be read: {why}") from None
    for number, line in enumerate(lines, 1):
        name, *words = line.partition("#")[0].split() or [""]
        if not name:
            continue
        try:
            yield _with_words(_parse(name), words)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}, line {number}: {error}") from None


def _with_words(host: Host, words: list[str]) -> Host:
    for word in words:
        key, _, value = word.partition("=")
        if key not in _SLOTS:
            raise InvalidArgument(f"{word!r} says nothing about host {host.name}: write {host.name} slots=2")
        if key == _SLOTS[0]:
            host = Host(host.name, _count(host.name, value))
    return host


def _parse(text: str) -> Host:
    if bracketed := _WITH_BRACKETS.fullmatch(text):
        user, address, count = bracketed.groups()
        name = user + address
        _check(name, text)
        return Host(name, None if count is None else _count(name, count))
    if text.count(":") > 1:
        raise InvalidArgument(f"put an IPv6 address in brackets: [{text}], or [{text}]:2")
    name, colon, count = text.partition(":")
    _check(name, text)
    return Host(name, _count(name, count) if colon else None)


def _check(name: str, text: str) -> None:
    """Raises InvalidArgument for what ssh or a shell may take for something else than a name."""
    if not name or name.startswith("-") or re.search(r"[\s\[\]{}'\"\\;&|<>$`,]", name):
        raise InvalidArgument(f"{text!r} is no host: {_FORM}")


def _count(name: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", text):
        raise InvalidArgument(
            f"host {name} has {text[:_MOST_SHOWN] or 'no number of'} workers: it is 1 or more, or leave it out"
        )
    return int(text)
