"""Programs that `poseidon run --on-failure rejoin` starts, and whose workers are killed at random moments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import SLOWED, compute_for, end, happens

RUN_SECONDS = 240 * SLOWED
_FOLDER = "KILLED_RUNS"
_RANK = os.environ.get("RANK")  # of the launcher, before the program hides it from a framework
_PAUSE_S = 0.02
_OPTIONS = {
    "abort": [],
    "rejoin": ["--on-failure", "rejoin"],
    "shrink": ["--on-failure", "shrink", "--max-restarts", "0"],
}


@dataclass(frozen=True)
class Ran:
    """What the workers of a run have said at its end, by rank, and what was printed."""

    answers: list[Any]
    printed: str


def note(step: int) -> None:
    """A worker's program says that it has come to this step, which takes a while."""
    compute_for(_PAUSE_S)
    _write(Path(os.environ[_FOLDER]) / f"at-{_RANK}", json.dumps([os.getpid(), step]))


def answer(rank: int, value: Any) -> None:
    """A worker's program says what it has in the end."""
    _write(Path(os.environ[_FOLDER]) / f"answer-{rank}", json.dumps(value))


def digest(arrays: Iterable[Any]) -> str:
    """Of the bytes of these arrays of NumPy."""
    made = hashlib.blake2b(digest_size=16)
    for one in arrays:
        made.update(f"{one.dtype} {one.shape}".encode() + one.tobytes())
    return made.hexdigest()


def run_killed(
    folder: Path,
    program: Path,
    *words: str,
    steps: int = 0,
    kills: int = 0,
    workers: int = 3,
    on_failure: str = "rejoin",
    **variables: str,
) -> Ran:
    """Runs the program, and kills a worker so many times. AssertionError with what was printed, if the run fails."""
    folder.mkdir()
    command = [sys.executable, "-m", "poseidon", "run", "-n", str(workers), *_OPTIONS[on_failure], program, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POSEIDON_TIMEOUT": "60", _FOLDER: str(folder), **variables}
    with (folder / "printed").open("w") as printed:
        run = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT, cwd=folder)
        try:
            _kill_at_random(folder, run, workers, steps, kills, random.Random(0))
            status = run.wait(RUN_SECONDS)
        finally:
            end(run)
    text = (folder / "printed").read_text()
    assert status == 0, text
    return Ran([json.loads(path.read_text()) for path in sorted(folder.glob("answer-*"))], text)


def _kill_at_random(
    folder: Path, run: subprocess.Popen[bytes], workers: int, steps: int, kills: int, draw: random.Random
) -> None:
    victims = [number % workers for number in range(kills)]  # each of them is started again three times at most
    draw.shuffle(victims)
    for number, victim in enumerate(victims):
        step = 2 + (steps - 6) * number // kills
        _wait_for(folder, run, lambda step=step: _least(folder, workers) > step)
        compute_for(draw.uniform(0, 2 * _PAUSE_S))
        killed = _at(folder, victim)[0]
        os.kill(killed, signal.SIGKILL)
        _wait_for(folder, run, lambda victim=victim, killed=killed: _at(folder, victim)[0] != killed)


def _wait_for(folder: Path, run: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    happened = happens(lambda: run.poll() is not None or condition(), RUN_SECONDS, every=0.002)
    printed = (folder / "printed").read_text()
    assert happened, printed
    assert run.poll() is None, printed


def _least(folder: Path, workers: int) -> int:
    """The step to which all workers have come."""
    return min(_at(folder, rank)[1] for rank in range(workers))


def _at(folder: Path, rank: int) -> tuple[int, int]:
    try:
        pid, step = json.loads((folder / f"at-{rank}").read_text())
    except FileNotFoundError:
        return 0, -1
    return pid, step


def _write(path: Path, text: str) -> None:
    path.with_suffix(".partial").write_text(text)
    os.replace(path.with_suffix(".partial"), path)
