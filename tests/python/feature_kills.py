#!/usr/bin/env python3
"""Trains a small job with on_failure and every feature that goes with it, and kills a worker in the middle.

    python tests/python/feature_kills.py                        # both values of on_failure, with each feature
    python tests/python/feature_kills.py --only LocalSGD tls    # with these features
    python tests/python/feature_kills.py --sample 0.2 --seed 3  # some of them

The worker is started again, and the result has to be that of a job in which nobody was killed: the same bits on all
ranks, and as close to one process as the features promise. Which pairs are refused is the business of feature_pairs.py.
A job takes some seconds. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import features
import poseidon.torch as poseidon
from feature_models import size_of, step_count
from feature_prediction import predicted
from feature_training import Answer, Mine, Moment, begin, compare, recovered_objects
from recovery_cases import Supervisor
from torch_cases import digest

KILLED, AT = 1, 3  # the rank, and the step in which it dies
FAILURES = ("on_failure=rejoin", "on_failure=shrink")


def jobs() -> list[tuple[str, str]]:
    """Both values of `on_failure` with each feature that the table lets train with it."""
    found = []
    for failure in FAILURES:
        for feature in features.FEATURES:
            settings = features.combine((failure, feature.name))
            if feature.name not in FAILURES and settings is not None and predicted(settings) is None:
                found.append((failure, feature.name))
    return found


def work(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """One rank's part, also of a process that replaces one."""
    settings, rank = features.combine(names), int(os.environ["RANK"])
    assert settings is not None
    begin(settings, rank, int(os.environ["MASTER_PORT"]), folder, "", Moment(folder, rank))
    mine = [Mine(settings, number, rank, None, Moment(folder, rank)) for number in range(settings.get("models", 1))]
    recovery = poseidon.Recovery(*recovered_objects(mine), directory=folder / "states")
    while recovery.until(step_count(settings)):
        with recovery.attempt():
            if rank == KILLED and recovery.step == AT and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            for one in mine:
                one.step(recovery.step)
    for one in mine:
        one.finish()
    answer = Answer(rank, digest=digest(param for one in mine for param in one.module.parameters()))
    poseidon.shutdown()
    if rank == 0:
        compare(settings, answer, mine)
    return asdict(answer)


def outcome(names: Sequence[str]) -> str:
    """What is wrong with a job; empty if nothing is."""
    settings = features.combine(names)
    assert settings is not None
    with tempfile.TemporaryDirectory(prefix="kills-") as made:
        secret = Path(made) / "secret"
        secret.touch(mode=0o600)
        secret.write_text("correct horse battery\n")
        supervisor = Supervisor(Path(made), size_of(settings), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        try:
            answers = supervisor.run(work, tuple(names))
        except AssertionError as error:
            return str(error)
    if supervisor.restarted != 1:
        return f"{supervisor.restarted} workers were started again"
    if len({answer["digest"] for answer in answers}) > 1:
        return "the ranks have different parameters"
    far = answers[0]["distance"] > features.limit(names) and features.limit(names) < features.NEAR
    return answers[0]["one_process"] or (f"off by {answers[0]['distance']:.2g} of the way" if far else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=features.BY_NAME, metavar="FEATURE")
    parser.add_argument("--sample", type=float, default=1.0, help="the part of the jobs")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chosen = [job for job in jobs() if not given.only or job[1] in given.only]
    chosen = random.Random(given.seed).sample(chosen, round(given.sample * len(chosen)))
    since, failed = time.monotonic(), 0
    for job in chosen:
        began, what = time.monotonic(), outcome(job)
        failed += bool(what)
        print(f"{time.monotonic() - began:.1f} s: {' + '.join(job)}: {what or 'right'}", flush=True)
    print(f"{len(chosen)} jobs, {failed} failed, {time.monotonic() - since:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
