#!/usr/bin/env python3
"""Trains a small job with every pair of features (features.py), and says where it is not what the table foresees.

    python tests/python/feature_pairs.py                          # all pairs
    python tests/python/feature_pairs.py --sample 0.1 --seed 3    # some of them
    python tests/python/feature_pairs.py --triples 300 --seed 3   # jobs of three features
    python tests/python/feature_pairs.py --only LocalSGD          # each feature with this one
    python tests/python/feature_pairs.py --only join tls          # this pair, in detail

The table (python/poseidon/adapter/features.py) and the rules of layers say before a job whether it is refused, at which
call and with which text (feature_prediction.py). All ranks have to say the same. Any other job has to train: to the
same bits on all ranks, and as close to one process as its features promise. The outcomes:

    right                trained, as foreseen
    right, unseen        the same, but a scheme or wire format of the pair was nowhere in effect
    refused              on all ranks, at the call and with the text that are foreseen
    no such argument     there is no way to ask for both
    refused by torch     one process cannot do it either

All others are failures: WRONG, "not refused" where the table refuses, "refused otherwise" where it does not or says
something else, "one rank" where the ranks differ, error, hang and crash. The exit status is 1 then. Nobody is killed:
with on_failure=rejoin and shrink a job trains in attempts, and nothing fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import features
import workers
from feature_models import MOST, size_of
from feature_prediction import Refusal, predicted
from feature_training import Answer, init_options, train
from poseidon import options
from poseidon.launch import free_port
from server_process import started_server
from waiting import SLOWED

LIMIT_S = 25.0 * SLOWED  # of one job
_AT_ONCE = 2
GOOD = ("right", "right, unseen", "refused", "no such argument", "refused by torch")
_OTHERS_FAILED = ("Aborted", "PeerLost", "PoseidonTimeout")  # kinds of errors that tell of another rank
_PASSING = re.compile(
    r" ?\((psd-[\w-]+|server)\)|; flight record.*|\b\d/\d@|127\.0\.0\.1:\d+|\b[\d.]+ m?s\b"
)  # other in each run


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `at`: when an error came."""

    kind: str
    at: str = ""
    text: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, [f"{self.kind}, at {self.at}" if self.at else self.kind, self.text]))


class Pairs:
    """Trains jobs in processes that stay up."""

    def __init__(self) -> None:
        self._cache = tempfile.TemporaryDirectory(prefix="cache-")  # of chunk sizes
        self._team = workers.Team(
            MOST,
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            CUDA_VISIBLE_DEVICES="",
            XDG_CACHE_HOME=self._cache.name,
        )

    def close(self) -> None:
        """Ends the processes."""
        self._team.close()
        self._cache.cleanup()

    def train(self, names: Sequence[str], shows: bool = False) -> Outcome:
        """Trains the job of these features; `shows` prints what every rank says."""
        settings = features.combine(names)
        assert settings is not None
        foreseen, size = predicted(settings), size_of(settings)
        if foreseen is not None:
            foreseen = replace(foreseen, text=_PASSING.sub("", foreseen.text))
        with tempfile.TemporaryDirectory(prefix="pair-") as made:
            folder = Path(made)
            secret = folder / "secret"
            secret.touch(mode=0o600)
            secret.write_text("correct horse battery\n")
            with _servers(settings, folder) as address:
                answers = self._team.ask(size, LIMIT_S, train, free_port(), folder, address, names)
            moments = [_text_of(folder / f"moment-{rank}") for rank in range(size)]
        for answer in answers:
            if isinstance(answer, Answer):
                text = answer.text.replace(str(folder), "FOLDER").replace(folder.name, "JOB")
                answer.text = _PASSING.sub("", text)
        if settings.get("torch"):  # which cannot end its group without the process
            self._team.close()
        if shows:
            for answer in answers:
                print(json.dumps(asdict(answer), indent=1) if isinstance(answer, Answer) else answer)
        if settings.get("part"):
            del answers[1], moments[1]
        return _outcome(names, answers, moments, foreseen)


def _text_of(file: Path) -> str:
    return file.read_text() if file.exists() else "its start"


@contextlib.contextmanager
def _servers(settings: dict[str, Any], folder: Path) -> Iterator[str]:
    """The address of a dedicated server, if the job has one, with the options that the workers have."""
    if not settings.get("servers"):
        yield ""
        return
    given = init_options(settings, 0, folder, "")
    known = {name: value for name, value in given.items() if name in options.BY_NAME}
    flags = [
        text
        for name, value in known.items()
        if options.BY_NAME[name].on_server
        for text in (options.BY_NAME[name].flag, str(value))
    ]
    with started_server("--interfaces", "127.0.0.1", *flags) as (_, start):
        yield start["address"]


def _outcome(names: Sequence[str], answers: Sequence[Any], moments: Sequence[str], foreseen: Refusal | None) -> Outcome:
    strange = [answer for answer in answers if isinstance(answer, workers.Failure)]
    if strange:
        kind = "crash" if any(answer.kind == "ChildProcessError" for answer in strange) else "error"
        return Outcome(kind, ", ".join(sorted(set(moments))), _errors_of(answers))
    if None in answers:
        missing = {moment for answer, moment in zip(answers, moments, strict=True) if answer is None}
        return Outcome("hang", ", ".join(sorted(missing)), _errors_of(answers))
    failed = [answer for answer in answers if answer.kind]
    if not failed:
        return _judged(names, answers) if foreseen is None else Outcome("not refused", foreseen.at, foreseen.text)
    own = [one for one in failed if one.kind not in _OTHERS_FAILED and "wait for each other" not in one.text]
    if not own:
        return Outcome("hang", failed[0].at, _errors_of(answers))
    first = own[0]
    if len({(answer.kind, answer.at) for answer in answers}) > 1:
        return Outcome("one rank", first.at, _errors_of(answers))
    if first.kind == "TypeError" and "unexpected keyword" in first.text:
        return Outcome("no such argument", first.at, first.text)
    if not first.is_own and answers[0].one_process:
        return Outcome("refused by torch", first.at, first.text)
    said = {(answer.kind, answer.at, answer.text) for answer in answers}
    if foreseen is not None and said == {("InvalidArgument", foreseen.at, foreseen.text)}:
        return Outcome("refused", first.at, first.text)
    if first.is_own:
        text = "" if foreseen is None else f"; foreseen at {foreseen.at}: {foreseen.text}"
        return Outcome("refused otherwise", first.at, first.text + text)
    return Outcome("error", first.at, f"{first.kind}: {first.text}")


def _errors_of(answers: Sequence[Any]) -> str:
    parts = []
    for answer in answers:
        if isinstance(answer, Answer):
            error = f"at {answer.at}: {answer.kind}: {answer.text}" if answer.kind else "no error"
            parts.append(f"rank {answer.rank} {error}")
        else:
            parts.append("no answer" if answer is None else repr(answer))
    return "; ".join(parts)


def _judged(names: Sequence[str], answers: Sequence[Answer]) -> Outcome:
    """A job without errors."""
    first, limit = answers[0], features.limit(names)
    if len({answer.digest for answer in answers}) > 1:
        return Outcome("WRONG", text="the ranks have different parameters")
    if first.one_process:
        return Outcome("WRONG", text=f"one process fails: {first.one_process}")
    way = f"off by {first.distance:.2g} of the way, cosine {first.cosine:.2f}, length {first.ratio:.2f}"
    near = first.cosine > 0.8 and 0.5 < first.ratio < 2.2
    if not (first.distance <= limit or (near and limit >= features.NEAR)):
        return Outcome("WRONG", text=way)
    if first.unseen:
        return Outcome("right, unseen", text=", ".join(first.unseen))
    return Outcome("right")


def all_jobs() -> list[tuple[str, ...]]:
    """Every feature alone, and every pair that can be asked for."""
    names = [feature.name for feature in features.FEATURES]
    jobs = [*((name,) for name in names), *itertools.combinations(names, 2)]
    return [job for job in jobs if features.combine(job) is not None]


def some_triples(count: int, seed: int) -> list[tuple[str, ...]]:
    """Jobs of three features that can be asked for."""
    names, chosen = [feature.name for feature in features.FEATURES], random.Random(seed)
    found: list[tuple[str, ...]] = []
    while len(found) < count:
        job = tuple(sorted(chosen.sample(names, 3), key=names.index))
        if features.combine(job) is not None:
            found.append(job)
    return found


def sample(part: float, seed: int) -> list[tuple[str, ...]]:
    """A part of all jobs with one or two features, in an order of its own."""
    jobs = all_jobs()
    return random.Random(seed).sample(jobs, round(part * len(jobs)))


def _chosen(given: argparse.Namespace) -> list[tuple[str, ...]]:
    if given.triples:
        return some_triples(given.triples, given.seed)
    if not given.only and not given.alone:
        return sample(given.sample, given.seed)
    jobs = all_jobs()
    if len(given.only) == 1:
        jobs = [job for job in jobs if given.only[0] in job]
    elif given.only:
        jobs = [tuple(given.only)]
    if given.alone:
        jobs = [job for job in jobs if len(job) == 1]
    return jobs


def _table(found: dict[str, str]) -> str:
    kinds = Counter(_kind_of(text) for text in found.values())
    lines = [f"{count:5} {kind}" for kind, count in kinds.most_common()]
    for kind in kinds:
        if kind not in ("right", "refused"):
            lines += ["", f"{kind}:"]
            lines += [f"  {name}{text.removeprefix(kind)}" for name, text in found.items() if _kind_of(text) == kind]
    return "\n".join(lines)


def _kind_of(text: str) -> str:
    kind = text.split(": ")[0]
    return kind if kind == "right, unseen" else kind.split(",")[0]


def _outcomes(jobs: Sequence[tuple[str, ...]], shows: bool) -> dict[str, str]:
    """Trains all jobs, two at a time, because each waits for a part of its time. Prints those that fail."""
    waiting, found = iter(enumerate(jobs, 1)), dict.fromkeys(map(" + ".join, jobs), "")

    def train_some() -> None:
        with contextlib.closing(Pairs()) as pairs:
            for number, job in waiting:
                began, name = time.monotonic(), " + ".join(job)
                outcome = pairs.train(job, shows)
                found[name] = str(outcome)
                if outcome.kind not in GOOD:
                    took = time.monotonic() - began
                    print(f"{number} of {len(jobs)}, {took:.1f} s: {name}: {outcome}", flush=True)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in [pool.submit(train_some) for _ in range(_AT_ONCE)]:
            done.result()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=features.BY_NAME, metavar="FEATURE")
    parser.add_argument("--alone", action="store_true", help="each feature without another one")
    parser.add_argument("--triples", type=int, default=0, metavar="COUNT", help="so many jobs of three features")
    parser.add_argument("--sample", type=float, default=1.0, help="the part of the jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    given = parser.parse_args()
    jobs, since = _chosen(given), time.monotonic()
    found = _outcomes(jobs, shows=len(given.only) > 1)
    if given.json:
        given.json.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(_table(found))
    print(f"{len(found)} jobs, {time.monotonic() - since:.0f} s")
    sys.exit(any(_kind_of(text) not in GOOD for text in found.values()))


if __name__ == "__main__":
    main()
