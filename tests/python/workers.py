"""Runs functions in several worker processes at once, as a launcher would start them.

`run(world_size, function, *args)` uses kept processes, since each costs an import of PyTorch; they
belong to one job of that size and are moved to another when the next call wants a different one.
A `Crew` does the same with another adapter's processes.
`run_fresh` starts processes for one call, which may break them. A `Team` keeps processes for functions that join and
leave jobs by themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from forked import FORK
from poseidon.launch import free_port
from waiting import SLOWED

CASE_TIMEOUT_S = 60.0 * SLOWED
JOB_TIMEOUT_S = 30.0
TORCH = "poseidon.torch"
_job_ids = itertools.count(1)


class WorkerError(AssertionError):
    """A worker raised, died or did not answer; the message has each rank's traceback."""


class Failure:
    """What a worker raised: the exception's class name, its text and its traceback."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.text = str(error)
        self.trace = traceback.format_exc()

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def job_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells a worker."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "POSEIDON_TIMEOUT": str(JOB_TIMEOUT_S),
    }


def _serve(pipe: Connection, environment: dict[str, str], adapter: str) -> None:
    """A worker's main: answers each (job id, variables, options, function, arguments)."""
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1)
    poseidon = import_module(adapter)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    current = 0
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            return
        job, variables, options, function, args = message
        try:
            if job not in (0, current):
                poseidon.shutdown()
                os.environ.update(variables)
                poseidon.init(**options)
                current = job
            answer = function(*args)
        except SystemExit:
            raise
        except BaseException as error:  # that of a failed pytest.raises is no Exception
            answer = Failure(error)
        pipe.send(answer)


class _Worker:
    """One process. That of PyTorch's adapter is forked from one that has imported it; others start without PyTorch."""

    def __init__(self, environment: Mapping[str, str], adapter: str = TORCH) -> None:
        if adapter == TORCH and find_spec("torch") is None:
            pytest.skip("PyTorch is not installed")
        context: Any = FORK if adapter == TORCH else get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, {**os.environ, **environment}, adapter), daemon=True)
        self.process.start()
        there.close()
        self.job = 0

    def show_stacks(self) -> None:
        """Makes it print where its threads are, some of which may wait for ever."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)  # nothing tells that it has done so, and the caller kills it next

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)

    def end(self, patience_s: float) -> None:
        self.process.join(patience_s)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _end_all(workers: list[_Worker], patience_s: float) -> None:
    for worker in workers:
        worker.ask_to_end()
    for worker in workers:
        worker.end(patience_s)
    workers.clear()


def _answers(workers: list[_Worker], timeout_s: float, patience_s: float) -> list[Any]:
    """Each rank's answer; None where its process ended. WorkerError when one does not come.

    Once a rank has failed the others have `patience_s` left.
    """
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(workers):
        missing = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in missing.values():
                workers[rank].show_stacks()
            failures = [f"rank {rank}: {a.trace}" for rank, a in answers.items() if isinstance(a, Failure)]
            raise WorkerError("\n".join([f"ranks {sorted(missing.values())} did not answer in time", *failures]))
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                answers[missing[pipe]] = pipe.recv()
            except (EOFError, ConnectionResetError):
                answers[missing[pipe]] = None
            if answers[missing[pipe]] is None or isinstance(answers[missing[pipe]], Failure):
                deadline = min(deadline, time.monotonic() + patience_s)
    return [answers[rank] for rank in range(len(workers))]


def _leave(adapter: str) -> None:
    """Ends a worker's part in its job."""
    import_module(adapter).shutdown()


class Crew:
    """Kept processes that run functions in jobs of one adapter, which is a module with `init()` and `shutdown()`.

    A function that takes longer than `timeout_s` has failed.
    """

    def __init__(self, adapter: str, timeout_s: float = CASE_TIMEOUT_S, **environment: str) -> None:
        self._adapter, self._timeout_s, self._environment = adapter, timeout_s, environment
        self._kept: list[_Worker] = []
        self._specs: dict[int, tuple[int, dict[str, Any]]] = {}
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the kept processes."""
        _end_all(self._kept, 10)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Runs `function(*args)` on every rank of a job that was initialized with `options`.

        Returns each rank's result; WorkerError if any rank raised, died or was too late.
        """
        # Test models are small: by default all their layers would travel in one group.
        options = {"small_bytes": 256, **options}
        while len(self._kept) < world_size:
            self._kept.append(_Worker(self._environment, self._adapter))
        team = self._kept[:world_size]
        job = team[0].job
        if any(worker.job != job for worker in team) or self._specs.get(job) != (world_size, options):
            job = next(_job_ids)
            self._specs[job] = (world_size, options)
        leaving = [worker for worker in self._kept[world_size:] if worker.job and team[0].job != job]
        for worker in leaving:  # those of the team may wait for them
            worker.job = 0
            worker.pipe.send((0, {}, {}, _leave, (self._adapter,)))
        port = free_port()
        for rank, worker in enumerate(team):
            worker.job = job
            worker.pipe.send((job, job_variables(rank, world_size, port), options, function, args))
        try:
            answers = _answers(team, self._timeout_s, patience_s=5.0)
            _answers(leaving, self._timeout_s, patience_s=5.0)
        except WorkerError:
            _end_all(self._kept, 0)
            raise
        failures = [f"rank {rank}: {a.trace}" for rank, a in enumerate(answers) if isinstance(a, Failure)]
        ended = [rank for rank, answer in enumerate(team) if not answer.process.is_alive()]
        if failures or ended:
            # A rank that failed leaves the others' exchange in the middle.
            _end_all(self._kept, 0)
            raise WorkerError("\n".join([f"ranks {ended} ended"] * bool(ended) + failures))
        return answers


CREW = Crew(TORCH)
run = CREW.run


def run_fresh(world_size: int, function: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
    """Runs `function(*args)` in processes of its own, which have not called init.

    Each rank's answer: its result, a Failure, or None where the process ended.
    """
    port = free_port()
    team = [_Worker({**job_variables(rank, world_size, port), **environment}) for rank in range(world_size)]
    try:
        for worker in team:
            worker.pipe.send((0, {}, {}, function, args))
        return _answers(team, CASE_TIMEOUT_S, CASE_TIMEOUT_S)
    finally:
        _end_all(team, 10)


class Team:
    """Kept processes of PyTorch's adapter that run functions in no job. A function that breaks them gets new ones."""

    def __init__(self, size: int, **environment: str) -> None:
        self._size, self._environment = size, environment
        self._workers: list[_Worker] = []
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the processes at once. The next call starts new ones."""
        _end_all(self._workers, 0)

    def ask(self, size: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(rank, *args)` in the first `size` processes.

        Returns each one's result, a Failure where it raised or ended, or None where it did not answer in time. New
        processes answer the next call unless all of these are in order.
        """
        if not self._workers:
            self._workers = [_Worker(self._environment) for _ in range(self._size)]
        asked = self._workers[:size]
        for rank, worker in enumerate(asked):
            worker.pipe.send((0, {}, {}, function, (rank, *args)))
        answers: list[Any] = [None] * size
        missing = {worker.pipe: rank for rank, worker in enumerate(asked)}
        deadline = time.monotonic() + timeout_s
        while missing and (ready := wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = missing.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Failure(ChildProcessError("the process ended"))
        for rank in missing.values():
            self._workers[rank].show_stacks()
        if any(answer is None or isinstance(answer, Failure) for answer in answers):
            self.close()
        return answers
