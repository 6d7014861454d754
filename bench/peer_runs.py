"""Runs of one training script by several methods in turn, each as workers of this machine."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from poseidon.launch import free_port

_TIMEOUT_S = 300.0
WARM_UP = 10  # steps that are not counted


def arguments(described: str | None, methods: Sequence[str]) -> argparse.Namespace:
    """The arguments of a script that compares `methods`, from the command line. `worker` is None, or its method."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of the layers; the gradient has about 12 width² bytes")
    parser.add_argument("--batch", type=int, default=32, help="of one worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", choices=methods, help=argparse.SUPPRESS)
    return parser.parse_args()


def print_steps(ended: Sequence[float]) -> None:
    """What the first worker says: the seconds of each step after the first `WARM_UP`, by when they ended."""
    if os.environ["RANK"] == "0":
        counted = ended[WARM_UP:]
        print(json.dumps([after - before for before, after in itertools.pairwise(counted)]))


def outputs_of(
    what: str, commands: Sequence[Sequence[str]], variables: Callable[[int], Mapping[str, str]], timeout_s: float
) -> list[str]:
    """What the workers of a job on this machine print, by rank. Each has a command, and `variables` of its own.

    Ends this process, with a text that begins with `what`, where one of them fails.
    """
    port, count = free_port(), len(commands)
    processes = []
    for rank, command in enumerate(commands):
        place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": rank}
        place["LOCAL_WORLD_SIZE"] = count
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}, **variables(rank)}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        sys.exit(f"{what} failed: its message is above")
    return outputs


def run(script: str, method: str, count: int, variables: Callable[[int], Mapping[str, str]]) -> float:
    """The median step of the first of `count` workers, in seconds. `variables`: of the environment, by rank."""
    command = [sys.executable, script, *sys.argv[1:], "--worker", method]
    outputs = outputs_of(method, [command] * count, variables, _TIMEOUT_S)
    return median(json.loads(outputs[0].splitlines()[-1]))


def in_turn(methods: Sequence[str], repeats: int, run_one: Callable[[str], float]) -> dict[str, float]:
    """Each method's median step, which is printed with those of all its runs. Prints what an adapter costs, too.

    That is "one", one worker with Poseidon, over "alone": the fastest runs of both are compared, then the next ones,
    and so on, and the median of the ratios counts. Runs of TensorFlow take 8.5 ms a step or 11.5 ms, by chance, with
    the adapter and without it, so that the ratio of two medians may be that of the two groups.
    """
    steps: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            steps[method].append(run_one(method))
    for method, found in steps.items():
        each = ", ".join(f"{1e3 * one:.1f}" for one in found)
        print(f"{method:10} {1e3 * median(found):7.1f} ms a step ({each})")
    pairs = zip(sorted(steps["one"]), sorted(steps["alone"]), strict=True)
    print(
        f"with one worker the adapter adds {median(one / alone for one, alone in pairs) - 1:+.1%} to a step (bar +2 %)"
    )
    return {method: median(found) for method, found in steps.items()}
