"""What has to hold on all machines before anything is started on them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.cluster.environment import places
from poseidon.cluster.facts import TOKEN_BYTES, digest
from poseidon.cluster.machine import Check, Machine, wait_for
from poseidon.errors import InvalidArgument
from poseidon.version import VERSION

ANSWER_S = 90.0  # torch takes long to count accelerators on a busy machine
_REACH_S = 15.0
_CHECK_S = 60.0
_LEAST_FREE_BYTES = 16 << 20
_MOST_SKEW_S = 2.0
_CHECK = ["-m", "poseidon.cluster.check"]


def learn_facts(machines: Sequence[Machine], files: Sequence[str], interrupted: Callable[[], bool]) -> bytes:
    """Asks all what they have, and compares it. Returns what they know each other by.

    Raises InvalidArgument with a line for each thing that is wrong.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    for machine in machines:
        machine.ask(token, files)
    wait_for(machines, lambda one: "facts" in one.answers, "say what it has", ANSWER_S, interrupted, False)
    if problems := list(problems_of(machines, files)):
        raise InvalidArgument("\n".join(problems))
    return token


def problems_of(machines: Sequence[Machine], files: Sequence[str]) -> Iterator[str]:
    """What is wrong with machines that have answered, in sentences. Their versions have to be those of the first."""
    own = {name: digest(Path(name)) for name in files}
    seen: dict[str, str] = {}
    for machine in machines:
        there = machine.answers["facts"]
        first = seen.setdefault(there["machine"], machine.name)
        if first != machine.name:
            yield f"{first} and {machine.name} are one machine: name it once, with all of its workers, as {first}:2"
            continue
        yield from _wrong_versions(machines[0], machine)
        if there["free_bytes"] < _LEAST_FREE_BYTES:
            yield f"the disk of host {machine.name} is full: {there['free_bytes']} bytes are free for temporary files"
        if machine.skew_s > _MOST_SKEW_S:
            yield (
                f"the clock of host {machine.name} is {machine.skew_s:.0f} s apart from the one here, so logs and "
                "checkpoints of the machines cannot be compared: timedatectl set-ntp true"
            )
        if not there["has_folder"]:
            yield f"host {machine.name} has no folder {Path.cwd()}: copy it there, or let --sync do it"
        else:
            yield from _wrong_files(machine.name, own, there["digests"])


def _wrong_versions(first: Machine, machine: Machine) -> Iterator[str]:
    reference, there = first.answers["facts"], machine.answers["facts"]
    for what, of_first in (("poseidon", VERSION), ("python", reference["python"]), ("torch", reference["torch"])):
        if there[what] != of_first:
            whose = "this machine" if what == "poseidon" else f"host {first.name}"
            yield f"host {machine.name} has {what} {there[what]}, and {whose} {of_first}: install the same on all"


def _wrong_files(host: str, own: Mapping[str, str | None], there: Mapping[str, str | None]) -> Iterator[str]:
    for name, content in own.items():
        if there[name] is None:
            yield f"host {host} has no {name}: copy it there, or let --sync do it"
        elif there[name] != content:
            yield f"{name} of host {host} differs from the one here: copy it there, or let --sync do it"


def master_address(
    machines: Sequence[Machine], token: bytes, interrupted: Callable[[], bool], others_come: bool
) -> str:
    """The first machine's address that all others reach. Raises InvalidArgument, also for two that do not reach.

    `others_come`: later. Then it is the one at which this machine reaches it.
    """
    if len(machines) == 1:
        return next(iter(_place(machines[0])[0]), "127.0.0.1") if others_come else "127.0.0.1"
    for machine in machines:
        targets = {other.name: _place(other) for other in machines if other is not machine}
        machine.connection.send("reach", token=token.hex(), targets=targets)
    wait_for(machines, lambda one: "reached" in one.answers, "try to reach the others", _REACH_S, interrupted)
    reached = {one.name: one.answers["reached"]["addresses"] for one in machines}
    for here in machines:
        for name, addresses in reached[here.name].items():
            if not addresses:
                tried = " or ".join(next(_place(one)[0] for one in machines if one.name == name)) or "any address"
                raise InvalidArgument(
                    f"host {here.name} does not reach host {name} at {tried}: a firewall, or they have no network in "
                    "common; workers connect to ports that are free, 1024 and above"
                )
    first = machines[0]
    for address in _place(first)[0]:
        if all(address in reached[other.name][first.name] for other in machines[1:]):
            return str(address)
    raise InvalidArgument(f"no address of host {first.name} is reached by all others: put first a host that has one")


def _place(machine: Machine) -> tuple[list[str], int]:
    there: dict[str, Any] = machine.answers["facts"]
    return there["addresses"], there["doorbell_port"]


def look_at_network(
    machines: Sequence[Machine],
    master: tuple[str, int],
    variables: Mapping[str, str],
    interrupted: Callable[[], bool],
) -> list[str]:
    """What may make the run slow, by the checks of `poseidon doctor --before`, in sentences.

    Raises InvalidArgument if the machines do not make a job.
    """
    if len(machines) == 1:
        return []
    cores = [machine.answers["facts"]["cores"] for machine in machines]
    checks = {machine.name: Check() for machine in machines}
    for machine, place in zip(machines, places([1] * len(machines), cores), strict=True):
        machine.start(checks[machine.name], place.rank, {**variables, **place.variables(master)}, _CHECK)

    def has_ended(machine: Machine) -> bool:
        """Or need not, as another one has failed."""
        return checks[machine.name].code is not None or any(check.code for check in checks.values())

    wait_for(machines, has_ended, "look at the network", _CHECK_S, interrupted)
    for machine in machines:
        check = checks[machine.name]
        if check.code:
            words = check.errors[-1] if check.errors else f"exit status {check.code}"
            raise InvalidArgument(f"the machines do not make a job: host {machine.name}: {words}")
    return list(_findings({name: json.loads(check.output[-1]) for name, check in checks.items()}))


def _findings(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Those that all machines have alike are told once."""
    hosts: dict[str, list[str]] = {}
    for name, findings in found.items():
        for one in findings["own"]:
            hosts.setdefault(_sentence(one), []).append(name)
        for one in findings["between"]:
            hosts.setdefault(_sentence(one), []).append("the network")
    for text, names in hosts.items():
        yield f"{'all hosts' if len(names) == len(found) > 1 else ', '.join(names)}: {text}"


def _sentence(finding: Mapping[str, str]) -> str:
    return f"{finding['about']}: {finding['text']}. {finding['mend']}"
