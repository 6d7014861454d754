"""Machines that come and go while a run goes on, as the file of hosts says (docs/launchers.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poseidon.cluster.before import ANSWER_S, problems_of
from poseidon.cluster.environment import Place, worker_variables
from poseidon.cluster.hosts import Host, parse_hosts
from poseidon.cluster.machine import Machine, RemoteWorker, Seat
from poseidon.errors import InvalidArgument
from poseidon.launch.workers import Output

_RETRY_S = 30.0  # after a machine could not be taken in
_LEAVE_S = 60.0  # for a step, and to leave


@dataclass
class Terms:
    """What newcomers need. `most`: the number of slots. `token`: by which the machines know each other."""

    path: Path
    master: tuple[str, int]
    variables: Mapping[str, str]
    program: Sequence[str]
    files: Sequence[str]
    most: int
    token: bytes
    make_machine: Callable[[Host], Machine]
    tell: Callable[[str], None]


@dataclass
class _Leaving:
    """A machine whose workers were asked to leave."""

    machine: Machine
    until: float
    was_empty: bool = False


@dataclass
class Growth:
    """Takes in machines that are added to the file, and dismisses those that are removed. `seats` by rank.

    Ranks in `dismissed` were asked to leave, or have left.
    """

    terms: Terms
    machines: list[Machine]
    seats: MutableMapping[int, Seat]
    dismissed: set[int] = field(default_factory=set)
    _arrivals: list[int] = field(default_factory=list)
    _text: str = ""
    _seen: str = ""
    _wanted: dict[str, Host] = field(default_factory=dict)
    _asked: dict[str, tuple[Machine, float]] = field(default_factory=dict)  # until when
    _not_before: dict[str, float] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _leaving: dict[str, _Leaving] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = {machine.name: machine.host for machine in self.machines}
        self._first = self.machines[0].host  # which has rank 0, where all meet

    def take_arrivals(self) -> list[int]:
        """The ranks that are to be started."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def look(self, now: float, output: Output) -> None:
        """Is called once a second."""
        self._read()
        for machine in list(self.machines):
            if machine.name not in self._wanted and machine.name not in self._leaving:
                self._dismiss(machine, now)
            elif not (machine.connection.is_open or machine.processes or machine.is_awaited):
                self._leaving.setdefault(machine.name, _Leaving(machine, now))  # nobody tries again
                self._not_before[machine.name] = now + _RETRY_S
        for leaving in list(self._leaving.values()):
            self._see_off(leaving, now)
        present = {machine.name for machine in self.machines}
        for name, host in self._wanted.items():
            if name not in present and name not in self._asked and now >= self._not_before.get(name, 0.0):
                self._ask(host, now, output)
        for machine, until in list(self._asked.values()):
            self._hear(machine, until, now)

    def finish(self) -> None:
        """Ends connections to machines that were not taken in yet."""
        for machine, _ in self._asked.values():
            machine.connection.hang_up()

    def _read(self) -> None:
        """A file that cannot be read for a moment, or says nonsense, changes nothing. It counts once it stays."""
        try:
            text = self.terms.path.read_text("utf-8")
            half_written, self._seen = text != self._seen, text
            if half_written or text == self._text:
                return
            self._text = text
            self._told.clear()
            wanted = {host.name: host for host in parse_hosts(str(self.terms.path))}
            if self._first.name not in wanted:
                self._tell_once(f"host {self._first.name} has rank 0, where all meet: it stays")
            self._wanted = {self._first.name: self._first, **wanted}
            self._not_before.clear()
        except (OSError, UnicodeDecodeError, InvalidArgument) as error:
            self._tell_once(f"the file of hosts is not followed: {error}")

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.terms.tell(text)

    def _dismiss(self, machine: Machine, now: float) -> None:
        ranks = self._ranks_of(machine)
        self.terms.tell(f"host {machine.name} is not in the file any more: {_ranks_text(ranks)} asked to leave")
        self.dismissed.update(ranks)
        for process in machine.processes.values():
            if isinstance(process, RemoteWorker):
                process.dismiss()
        self._leaving[machine.name] = _Leaving(machine, now + _LEAVE_S)

    def _see_off(self, leaving: _Leaving, now: float) -> None:
        """Gives the seats back one look after the last worker has ended, so that its end was seen before."""
        machine = leaving.machine
        if leaving.was_empty:
            machine.connection.hang_up()
            self.machines.remove(machine)
            for rank in self._ranks_of(machine):
                del self.seats[rank]
            del self._leaving[machine.name]
        elif now >= leaving.until:
            for process in machine.processes.values():
                machine.connection.send("kill", number=process.number)
        leaving.was_empty = not machine.processes

    def _ranks_of(self, machine: Machine) -> list[int]:
        return sorted(rank for rank, seat in self.seats.items() if seat.machine is machine)

    def _ask(self, host: Host, now: float, output: Output) -> None:
        if len(self.seats) >= self.terms.most:
            self._tell_once(f"host {host.name} waits: the run has its {self.terms.most} workers")
            return
        machine = self.terms.make_machine(host)
        for file, reader in machine.connection.files:
            output.attach(file, reader)
        machine.ask(self.terms.token, self.terms.files)
        self._asked[host.name] = (machine, now + ANSWER_S)

    def _hear(self, machine: Machine, until: float, now: float) -> None:
        machine.connection.send("alive")
        if "facts" in machine.answers:
            first = [one for one in self.machines if one.connection.is_open][:1]
            problems = list(problems_of([*first, machine], self.terms.files))
        elif not machine.connection.is_open:
            problems = [machine.why()]
        elif now > until:
            problems = [f"host {machine.name} takes more than {ANSWER_S:g} s to say what it has"]
        else:
            return
        del self._asked[machine.name]
        if not problems and machine.name in self._wanted:
            self._seat(machine)
            return
        for text in problems:
            self._tell_once(text)
        self._not_before[machine.name] = now + _RETRY_S
        machine.connection.hang_up()

    def _seat(self, machine: Machine) -> None:
        least = 0 if machine.name == self._first.name else 1
        free = sorted(set(range(least, self.terms.most)) - set(self.seats))
        ranks = free[: machine.worker_count]
        cores = machine.answers["facts"]["cores"]
        machine.set_up(self.terms.program)
        self.machines.append(machine)
        for local, rank in enumerate(ranks):
            place = Place(rank, self.terms.most, local, len(ranks), len(self.machines) - 1, cores)
            environment = worker_variables(place.variables(self.terms.master), self.terms.variables)
            self.seats[rank] = Seat(machine, environment)
            self.dismissed.discard(rank)
        self._arrivals += ranks
        self.terms.tell(f"host {machine.name} comes: {_ranks_text(ranks)} started")


def _ranks_text(ranks: Sequence[int]) -> str:
    verb = "are" if len(ranks) != 1 else "is"
    return f"{'ranks' if len(ranks) != 1 else 'rank'} {', '.join(map(str, ranks))} {verb}"
