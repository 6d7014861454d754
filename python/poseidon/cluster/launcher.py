"""One run on several machines, from the first connection to the last worker's end."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from poseidon.cluster.before import learn_facts, look_at_network, master_address, synchronize_all
from poseidon.cluster.environment import job_variables, place_variables, replica_variables, variables_before
from poseidon.cluster.hosts import Host
from poseidon.cluster.machine import Machine
from poseidon.cluster.workplace import Machines
from poseidon.errors import InvalidArgument
from poseidon.launch.environment import own_job_name
from poseidon.launch.launcher import tell_outcome
from poseidon.launch.outcome import Outcome, Recovery
from poseidon.launch.run import OnLine, Run
from poseidon.launch.signals import Signals, caught_signals
from poseidon.launch.terminal import Terminal
from poseidon.options import BY_NAME, check_environment, resolve_option


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


@dataclass
class _Job:
    """What was settled before the run."""

    counts: list[int]
    environments: list[dict[str, str]]


def run_on_hosts(plan: Plan, options: Mapping[str, object], on_line: OnLine | None = None) -> Outcome:
    """Runs the program as the workers of one job on these machines, the first of which has rank 0.

    Every rank's lines go to standard output and error with `[rank host]` before them, or with `on_line(rank, text)`
    there. `options` (name to value) are those of Poseidon. A failure, and a signal, are as of `launch.run_workers`. A
    machine whose connection is lost has failed, with its workers, which end by themselves there. With the option
    on_failure=rejoin or shrink the launcher connects again for a minute.

    Raises InvalidArgument, with a line for each thing that is wrong, before anything was started. Then nothing is left.
    """
    variables = job_variables(options, plan.environment)
    recovery = Recovery.of(resolve_option("on_failure", variables), plan.max_restarts)
    recovery = replace(recovery, together=plan.replicas)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_not_stopped())
        signals = stack.enter_context(caught_signals())
        terminal = stack.enter_context(contextlib.closing(Terminal(lambda: signals.interrupted)))
        machines = list(_connected(plan, terminal, stack))
        try:
            job = _prepare(plan, machines, variables, signals, terminal)
        except KeyboardInterrupt:
            return Outcome(interrupted_by=signals.received[0])
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poseidon-run-")))
        workplace = Machines(machines, job.counts, job.environments, plan.program, marks, terminal)
        outcome = Run(len(job.environments), workplace, marks, on_line, signals, terminal, recovery).run()
        tell_outcome(outcome, marks, terminal)
    if signals.received and not outcome.interrupted_by:  # after the run
        outcome.interrupted_by = signals.received[0]
    return outcome


def _connected(plan: Plan, terminal: Terminal, stack: contextlib.ExitStack) -> Iterator[Machine]:
    for host in plan.hosts:

        def tell(text: str, name: str = host.name) -> None:
            terminal.tell(text, who=name)

        machine = Machine(host, plan.ssh, plan.python, tell)
        stack.callback(machine.close)
        yield machine


def _prepare(
    plan: Plan, machines: Sequence[Machine], variables: dict[str, str], signals: Signals, terminal: Terminal
) -> _Job:
    """All that has to hold before the run. Raises InvalidArgument, and KeyboardInterrupt after a signal."""

    def interrupted() -> bool:
        return signals.interrupted

    if plan.copies:
        synchronize_all(plan.ssh, machines)
    token = learn_facts(machines, plan.files, interrupted)
    address = master_address(machines, token, interrupted)
    facts = [machine.answers["facts"] for machine in machines]
    counts = [machine.host.workers or max(1, one["accelerators"]) for machine, one in zip(machines, facts, strict=True)]
    ports = [one["ports"] for one in facts]
    cores = [one["cores"] for one in facts]
    job = BY_NAME["job"].variable
    if name := own_job_name(plan.program, variables):
        terminal.tell(f"on the servers this job is '{name}'; choose another name with --job NAME")
        variables[job] = name
    if plan.replicas:
        if len(set(counts)) > 1:
            told = ", ".join(f"{machine.name} {count}" for machine, count in zip(machines, counts, strict=True))
            raise InvalidArgument(f"replicas have equally many ranks, and here they have: {told}")
        meeting = (address, plan.master_port or ports[0]["shards"])
        places = replica_variables(meeting, [one["run"] for one in ports], cores, counts[0])
    else:
        places = place_variables((address, plan.master_port or ports[0]["run"]), counts, cores)
    environments = [{**place, **variables, **_fixed(place)} for place in places]
    check_environment({**os.environ, **environments[0]})
    for text in look_at_network(machines, (address, ports[0]["before"]), variables_before(variables), interrupted):
        terminal.tell(text)
    where = ", ".join(f"{count} on {machine.name}" for machine, count in zip(machines, counts, strict=True))
    what = f"{len(machines)} replicas of {counts[0]} workers" if plan.replicas else f"{len(places)} workers"
    terminal.tell(f"{what}: {where}; rank 0 at {address}")
    return _Job(counts, environments)


def _fixed(place: Mapping[str, str]) -> dict[str, str]:
    """What no variable of the user's changes. OMP_NUM_THREADS may be his."""
    return {name: value for name, value in place.items() if name != "OMP_NUM_THREADS"}


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
