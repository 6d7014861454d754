"""One run on several machines, from the first connection to the last worker's end."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poseidon.cluster.before import learn_facts, look_at_network, master_address
from poseidon.cluster.environment import job_variables, places, replica_variables, variables_before, worker_variables
from poseidon.cluster.files import synchronize
from poseidon.cluster.growth import Growth, Terms
from poseidon.cluster.hosts import Host
from poseidon.cluster.machine import Heartbeat, Machine, Seat
from poseidon.cluster.workplace import Machines
from poseidon.errors import InvalidArgument
from poseidon.launch.environment import own_job_name
from poseidon.launch.guard import Guard
from poseidon.launch.launcher import tell_outcome
from poseidon.launch.outcome import Outcome, Recovery
from poseidon.launch.run import OnLine, Run
from poseidon.launch.signals import Signals, caught_signals
from poseidon.launch.terminal import Terminal
from poseidon.options import BY_NAME, check_environment, is_given, resolve_option


@dataclass(frozen=True)
class Plan:
    """What to run where.

    `program`: the arguments of Python. `files`: that all machines must have as this one has them, relative to the
    working directory or absolute. `python`: its path on the machines. `ssh`: the command, with options. `environment`:
    NAME or NAME=VALUE each, for the workers.
    """

    hosts: Sequence[Host]
    program: Sequence[str]
    files: Sequence[str]
    python: str
    ssh: str = "ssh"
    copies: bool = False
    environment: Sequence[str] = ()
    master_port: int | None = None
    max_restarts: int | None = None
    replicas: bool = False
    workers: tuple[int, int] | None = None
    hosts_file: Path | None = None


@dataclass
class _Job:
    """What was settled before the run."""

    seats: dict[int, Seat]
    master: tuple[str, int]
    token: bytes


def run_on_hosts(plan: Plan, options: Mapping[str, object], on_line: OnLine | None = None) -> Outcome:
    """Runs the program as the workers of one job on these machines, the first of which has rank 0.

    Every rank's lines go to standard output and error with `[rank host]` before them, or with `on_line(rank, text)`
    there. `options` (name to value) are those of Poseidon. A failure, and a signal, are as of `launch.run_workers`. A
    machine whose connection is lost has failed, with its workers, which end by themselves there. With the option
    on_failure=rejoin or shrink the launcher connects again for a minute.

    Raises InvalidArgument, with a line for each thing that is wrong, before anything was started. Then nothing is left.
    """
    variables = job_variables(options, plan.environment)
    if plan.workers is not None:
        _let_it_grow(plan.workers, plan.replicas, variables)
    recovery = Recovery.of(resolve_option("on_failure", variables), plan.max_restarts)
    recovery = replace(recovery, together=plan.replicas)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_not_stopped())
        signals = stack.enter_context(caught_signals())
        terminal = stack.enter_context(contextlib.closing(Terminal(lambda: signals.interrupted)))

        def connect(host: Host) -> Machine:
            machine = Machine(host, plan.ssh, plan.python, lambda text: terminal.tell(text, who=host.name))
            stack.callback(machine.close)
            return machine

        machines: list[Machine] = []
        try:
            if plan.copies:
                synchronize(plan.ssh, [host.name for host in plan.hosts], lambda: signals.interrupted)
            machines += map(connect, plan.hosts)
            stack.enter_context(contextlib.closing(Heartbeat(machines)))
            job = _prepare(plan, machines, variables, signals, terminal)
        except KeyboardInterrupt:
            return Outcome(interrupted_by=signals.received[0])
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poseidon-run-")))
        stack.enter_context(contextlib.closing(Guard(marks)))
        most = plan.workers[1] if plan.workers else len(job.seats)
        growth = None
        if plan.workers and plan.hosts_file:
            terms = Terms(
                *(plan.hosts_file, job.master, variables, plan.program, plan.files, most, job.token),
                *(connect, terminal.tell),
            )
            growth = Growth(terms, machines, job.seats)
        workplace = Machines(machines, job.seats, plan.program, marks, terminal, growth)
        outcome = Run(most, workplace, marks, on_line, signals, terminal, recovery).run()
        tell_outcome(outcome, marks, terminal)
    if signals.received and not outcome.interrupted_by:  # after the run
        outcome.interrupted_by = signals.received[0]
    return outcome


def _let_it_grow(workers: tuple[int, int], replicas: bool, variables: dict[str, str]) -> None:
    """Sets the options of a job whose workers come and go. Raises InvalidArgument for others that were given."""
    if replicas:
        raise InvalidArgument("a range of workers and --replicas exclude each other: give all machines from the start")
    for name, value in (("on_failure", "shrink"), ("min_workers", str(workers[0]))):
        given = resolve_option(name, variables) if is_given(name, variables) else None
        if given is not None and str(given) != value:
            raise InvalidArgument(
                f"--workers {workers[0]}:{workers[1]} makes {name} {value}, and it was given as {given}: leave it out"
            )
        variables[BY_NAME[name].variable] = value


def _prepare(
    plan: Plan, machines: Sequence[Machine], variables: dict[str, str], signals: Signals, terminal: Terminal
) -> _Job:
    """All that has to hold before the run. Raises InvalidArgument, and KeyboardInterrupt after a signal."""

    def interrupted() -> bool:
        return signals.interrupted

    token = learn_facts(machines, plan.files, interrupted)
    address = master_address(machines, token, interrupted, plan.workers is not None)
    job = BY_NAME["job"].variable
    if name := own_job_name(plan.program, variables):
        terminal.tell(f"on the servers this job is '{name}'; choose another name with --job NAME")
        variables[job] = name
    facts = [machine.answers["facts"] for machine in machines]
    counts = _counts(plan, machines)
    master = (address, plan.master_port or facts[0]["ports"]["shards" if plan.replicas else "run"])
    seats = _seats(plan, machines, counts, master, variables)
    check_environment({**os.environ, **seats[0].environment})
    there = (address, facts[0]["ports"]["before"])
    for text in look_at_network(machines, there, variables_before(variables), interrupted):
        terminal.tell(text)
    where = ", ".join(f"{count} on {machine.name}" for machine, count in zip(machines, counts, strict=True))
    workers = f"{len(seats)} workers" if len(seats) > 1 else "1 worker"
    what = f"{len(machines)} replicas of {counts[0]} workers" if plan.replicas else workers
    terminal.tell(f"{what}: {where}; rank 0 at {address}")
    return _Job(seats, master, token)


def _seats(
    plan: Plan,
    machines: Sequence[Machine],
    counts: Sequence[int],
    master: tuple[str, int],
    variables: Mapping[str, str],
) -> dict[int, Seat]:
    """Of the workers with which the run begins. `counts`: of each machine's."""
    facts = [machine.answers["facts"] for machine in machines]
    cores = [one["cores"] for one in facts]
    if plan.replicas:
        own = replica_variables(master, [one["ports"]["run"] for one in facts], cores, counts[0])
    else:
        own = [place.variables(master) for place in places(counts, cores, plan.workers[1] if plan.workers else None)]
    owners = [machine for machine, count in zip(machines, counts, strict=True) for _ in range(count)]
    return {
        rank: Seat(owner, worker_variables(place, variables))
        for rank, (owner, place) in enumerate(zip(owners, own, strict=True))
    }


def _counts(plan: Plan, machines: Sequence[Machine]) -> list[int]:
    """How many workers each machine has. Raises InvalidArgument for replicas of different sizes."""
    counts = [machine.worker_count for machine in machines]
    told = ", ".join(f"{machine.name} {count}" for machine, count in zip(machines, counts, strict=True))
    if plan.replicas and len(set(counts)) > 1:
        raise InvalidArgument(f"replicas must have equally many ranks, and here they have: {told}")
    if plan.workers and sum(counts) > plan.workers[1]:
        raise InvalidArgument(
            f"the hosts have {sum(counts)} workers, and --workers allows {plan.workers[1]}: they have {told}; leave "
            "some out, or allow more"
        )
    return counts


@contextlib.contextmanager
def _not_stopped() -> Iterator[None]:
    """Ctrl-Z does nothing: the machines would take a launcher that says nothing for lost."""
    try:
        before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
