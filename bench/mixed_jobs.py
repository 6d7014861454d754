#!/usr/bin/env python3
"""Trains jobs in which one rank runs with another interpreter, for example of another processor.

    python bench/mixed_jobs.py --other "chroot /arm64 /venv/bin/python /src/bench/mixed_jobs.py" --jobs 100
    python bench/mixed_jobs.py --other "chroot /arm64 /venv/bin/python /src/bench/mixed_jobs.py" --framework torch

`--other` is the command that runs this file there. Random jobs of push and pull on arrays (`arrays`) compare their
values with those of one process on each rank. A small model (`torch`) is updated by servers, in several formats, and
then by an optimizer on each rank. The ranks' digests must be equal, unless a rank was warned of rounding. They are also
compared with those of ranks that all run here. The exit status is 1 if ranks differ without a warning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peer_runs import outputs_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

_TIMEOUT_S = 1800


class Result(NamedTuple):
    """What a rank says of one job."""

    job: str
    digest: str  # of what the rank has in the end
    warned: bool = False  # that the ranks round differently


def array_jobs(first: int, count: int) -> Iterator[Result]:
    """Random jobs of push and pull. A job's name has the rules by which servers update."""
    import random_arrays

    joined: dict[str, Any] | None = None
    for seed in range(first, first + count):
        options = random_arrays.options(seed)
        if options != joined:
            random_arrays.shutdown()
            random_arrays.init(**options)
            joined = options
        digest = random_arrays.run_job(seed)
        job = random_arrays.make(seed)
        rules = sorted({key.rule.partition(" ")[0] for key in (*job.keys, *job.later) if key.rule})
        yield Result(f"{seed} {'+'.join(rules) or 'sums'}", digest)
    random_arrays.shutdown()


_SERVER = "server"
_WORKER = "worker"
_TORCH_JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    (_SERVER, {"scheme": "ps"}),
    (_SERVER, {"wire": "bf16", "parameter_wire": "bf16"}),
    (_SERVER, {"coding": "on", "transport": "tcp"}),
    (_WORKER, {"scheme": "ps"}),
    (_WORKER, {"scheme": "sfb"}),
    (_WORKER, {"scheme": "sharded_factors"}),
    (_WORKER, {"wire": "int8", "error_feedback": "on"}),
)


def torch_jobs(first: int, count: int) -> Iterator[Result]:
    """A model with a convolution, two optimizers, and several ways of exchange: its parameters in the end."""
    import torch

    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for update, options in _TORCH_JOBS:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                digest = _train(kind, update, options, first, count)
            warned = any("compute differently" in str(warning.message) for warning in caught)
            yield Result(f"{kind.__name__} on {update}s {options}", digest, warned)


def _train(kind: Any, update: str, options: dict[str, Any], seed: int, steps: int) -> str:
    import torch

    import poseidon.torch as poseidon

    poseidon.init(replica_check=5, **options)
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 64), torch.nn.Linear(64, 3)
    )
    keywords = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    model = poseidon.DistributedDataParallel(layers)
    optimizer = poseidon.DistributedOptimizer(kind(model.parameters(), lr=0.01, **keywords), model, update=update)
    generator = torch.Generator().manual_seed(seed + poseidon.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        torch.nn.functional.cross_entropy(model(inputs), torch.randint(3, (8,), generator=generator)).backward()
        optimizer.step()
    optimizer.synchronize()
    poseidon.shutdown()
    values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.blake2b(values, digest_size=8).hexdigest()


_JOBS: dict[str, Callable[[int, int], Iterator[Result]]] = {"arrays": array_jobs, "torch": torch_jobs}


def _run(commands: list[list[str]]) -> list[list[Result]]:
    """What each rank of a job whose ranks have these commands says."""
    printed = outputs_of("a rank", commands, lambda rank: {}, _TIMEOUT_S)
    return [[Result(*json.loads(line)) for line in text.splitlines() if line.startswith("[")] for text in printed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", help="the command of the last rank; without it this process is a rank")
    parser.add_argument("--framework", choices=_JOBS, default="arrays")
    parser.add_argument("--jobs", type=int, default=100, help="how many; for torch how many steps each")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    own = ["--framework", given.framework, "--jobs", str(given.jobs), "--seed", str(given.seed)]
    if given.other is None:
        for job in _JOBS[given.framework](given.seed, given.jobs):
            print(json.dumps(job), flush=True)
        return
    here = [sys.executable, __file__, *own]
    mixed = _run([here, [*shlex.split(given.other), *own]])
    alike = _run([here, here])
    wrong = 0
    for first, last, local in zip(*mixed, alike[0], strict=True):
        if first.digest != last.digest and not (first.warned and last.warned):
            wrong += 1
            print(f"the ranks differ without a warning: {first.job}")
        elif first.digest != last.digest:
            print(f"the ranks differ, and say so: {first.job}")
        elif first.digest != local.digest:
            print(f"equal on both ranks, but not as with two ranks here: {first.job}")
    print(f"{len(mixed[0])} jobs, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
