"""Starts the workers of a run and waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from poseidon.dscp import default_classes
from poseidon.errors import InvalidArgument
from poseidon.failure_marks import text_of
from poseidon.launch.environment import environments_of, own_job_name
from poseidon.launch.guard import Guard
from poseidon.launch.outcome import Failure, Outcome, Recovery
from poseidon.launch.run import OnLine, Run
from poseidon.launch.signals import caught_signals
from poseidon.launch.terminal import Terminal
from poseidon.launch.workers import LocalWorkplace
from poseidon.options import (
    BY_NAME,
    FAILURE_MARK_VARIABLE,
    check_environment,
    resolve_option,
    to_environment,
)
from poseidon.testbed import Testbed

_CLASSES = BY_NAME["priority_classes"]
_STANDARD_ERROR = 2


def launch(
    command: Sequence[str],
    count: int,
    link: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    testbed: Testbed | None = None,
    options: Mapping[str, object] | None = None,
    master_port: int | None = None,
    on_line: OnLine | None = None,
    max_restarts: int | None = None,
) -> list[int]:
    """Runs `command` as `count` workers and returns their exit codes by rank (negative: a signal).

    `link` ("100mbit") puts each worker on its own host with a port of that rate. `testbed` uses a testbed that is up,
    with rank i on host i. `env` adds variables. `options` (name to value) sets options of Poseidon. Rank 0 has the
    terminal; the output of the others is prefixed with `[rank]`. With `on_line(rank, text)` every rank's output goes
    there instead.

    If a rank fails, the others are ended, and standard error says which rank failed first. With the option
    on_failure=rejoin or shrink the rank is started again instead, up to `max_restarts` times (None: 3), unless another
    rank has come to the end. After that the run ends or, with shrink, goes on without the rank. With the option replica
    all ranks are ended and started again.

    Raises InvalidArgument if the workers cannot be started, TestbedError if the machine cannot have shaped links, and
    KeyboardInterrupt or SystemExit after a signal, once all workers have ended.
    """
    outcome = run_workers(command, count, link, env, testbed, options, master_port, on_line, max_restarts)
    if outcome.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.interrupted_by:
        raise SystemExit(outcome.exit_status)
    return outcome.codes


def run_workers(
    command: Sequence[str],
    count: int,
    link: str | None = None,
    env: Mapping[str, str] | None = None,
    testbed: Testbed | None = None,
    options: Mapping[str, object] | None = None,
    master_port: int | None = None,
    on_line: OnLine | None = None,
    max_restarts: int | None = None,
) -> Outcome:
    """The same as `launch`, but a signal is part of the outcome and raises no exception."""
    if count < 1:
        raise InvalidArgument(f"the number of workers is {count}: it must be 1 or more")
    if link is not None and testbed is not None:
        raise InvalidArgument("a link rate cannot be given together with a testbed, whose links have theirs")
    if testbed is not None and len(testbed.hosts) < count:
        raise InvalidArgument(f"{count} workers need {count} hosts, but the testbed has {len(testbed.hosts)}")
    variables = {**(env or {}), **to_environment(options or {})}
    given = {**os.environ, **variables}
    together = bool(resolve_option("replica", given))
    recovery = Recovery.of(resolve_option("on_failure", given), max_restarts, together)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(caught_signals())
        terminal = stack.enter_context(contextlib.closing(Terminal(lambda: signals.interrupted)))
        if link is not None:
            classes = variables.get(_CLASSES.variable) or default_classes(count)
            testbed = stack.enter_context(Testbed(count, link, priorities=int(classes)))
        environments = environments_of(count, variables, testbed, master_port)
        if name := own_job_name(command, environments[0]):
            terminal.tell(f"on the servers this job is '{name}'; choose another name with --job NAME")
            for environment in environments:
                environment[BY_NAME["job"].variable] = name
        check_environment(environments[0])  # once here, instead of an exception in each worker
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poseidon-run-")))
        for rank, environment in enumerate(environments):
            environment[FAILURE_MARK_VARIABLE] = str(marks / str(rank))
        commands = [testbed.command(rank, command) if testbed else list(command) for rank in range(count)]
        guard = stack.enter_context(contextlib.closing(Guard(marks)))
        inherits = "" if on_line else "all" if os.isatty(_STANDARD_ERROR) else "output"
        workplace = LocalWorkplace(dict(enumerate(commands)), dict(enumerate(environments)), guard, inherits)
        outcome = Run(count, workplace, marks, on_line, signals, terminal, recovery).run()
        outcome.rank_zero_has_terminal = inherits == "all"
        tell_outcome(outcome, marks, terminal)
    if signals.received and not outcome.interrupted_by:  # after the run, while nobody read the rest of its output
        outcome.interrupted_by = signals.received[0]
    return outcome


def tell_outcome(outcome: Outcome, marks: Path, terminal: Terminal) -> None:
    """Says why a run has ended, unless its workers came to their end. `marks`: the folder of theirs."""
    if outcome.interrupted_by:
        _tell_interruption(outcome, terminal)
    elif outcome.first_failure:
        _tell_failure(outcome, outcome.first_failure, text_of(marks / str(outcome.first_failure.rank)), terminal)


def _tell_failure(outcome: Outcome, failure: Failure, cause: str, terminal: Terminal) -> None:
    ended = ", ".join(map(str, outcome.ended_ranks))
    tail = f"; these ranks did not end by themselves and were ended: {ended}" if ended else ""
    terminal.tell(f"{failure}{tail}")
    if cause:
        terminal.tell(f"the cause: {cause}")
    elif failure.code < 0:
        return  # one that was killed has written about other things
    elif failure.rank == 0 and outcome.rank_zero_has_terminal:
        terminal.tell("the cause: see what rank 0 has written above")
    elif outcome.last_errors[failure.rank]:
        terminal.tell(f"the cause, by its last line: {outcome.last_errors[failure.rank]}")


def _tell_interruption(outcome: Outcome, terminal: Terminal) -> None:
    killed = ", ".join(map(str, outcome.ended_ranks))
    tail = f"; these ranks did not end when asked and were ended: {killed}" if killed else "; all ranks have ended"
    terminal.tell(f"the run was interrupted by {signal.Signals(outcome.interrupted_by).name}{tail}")
