"""What checkpoints of a server cost a training step.

Two workers push gradients to a server that saves parameters and optimizer state every --every steps. Compute is
replaced by sleep. The step that saves, and the --window steps from it on, in which the files are written, are compared
with the median step. The time that they take longer, spread over all steps, is the cost. The same sum over as many
steps from the middle between two checkpoints shows the noise. Both are means over --blocks checkpoints, with their
standard error. The exit status is 1 if the cost is above the bar.

    python bench/checkpoint_cost.py --directory /shared/checkpoints
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from statistics import mean, median, stdev
from typing import Any

import numpy as np

import poseidon

BAR = 0.01
WORKERS = 2


def serving(stack: ExitStack, *options: str) -> str:
    """The address of a `poseidon server` that ends with the stack."""
    command = [sys.executable, "-m", "poseidon", "server", "--json", *options]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    text = ""
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start")
        text += line
    return json.loads(text)["address"]


def stepper(address: str, rank: int, args: argparse.Namespace) -> Callable[[], None]:
    """One training step of a worker."""
    exchange = poseidon.connect(
        rank=rank, world_size=WORKERS, master_addr="127.0.0.1", master_port=args.port, servers=[address]
    )
    count = int(args.megabytes * 1e6 / 4 / args.layers)
    parameters = {f"layer {i}": np.zeros(count, "float32") for i in range(args.layers)}
    gradients = {name: np.full(count, 1e-3, "float32") for name in parameters}
    exchange.declare(parameters)
    rule = poseidon.UpdateRule("adamw", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)
    exchange.set_rule(parameters, rule)

    def step() -> None:
        time.sleep(args.compute_ms / 1e3)
        exchange.push_pull(gradients, out=parameters)

    return step


def work(rank: int, address: str, args: argparse.Namespace, results: Any) -> None:
    """A worker's main: rank 0 reports the seconds of each step, from one that saves on."""
    step = stepper(address, rank, args)
    seconds = []
    for _ in range(args.every * (args.blocks + 2)):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        # The first checkpoint allocates. Step N is seconds[N - 1] and saves if N is a multiple of `every`.
        results.put(seconds[2 * args.every - 1 : -1])


def awaited(results: Any, workers: Sequence[Any]) -> list[float]:
    """Rank 0's result; SystemExit if a worker fails instead. A worker ends only when its result has been taken."""
    while True:
        with suppress(queue.Empty):
            return results.get(timeout=0.2)
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")


def measure(args: argparse.Namespace, directory: str) -> list[list[float]]:
    """The steps of each block, of which the first saves."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    saving = ["--checkpoint-dir", directory, "--checkpoint-every", str(args.every)]
    with ExitStack() as stack:
        address = serving(stack, "--server-cores", str(args.server_cores), *saving)
        workers = [context.Process(target=work, args=(r, address, args, results)) for r in range(WORKERS)]
        for worker in workers:
            worker.start()
            stack.callback(worker.terminate)
        seconds = awaited(results, workers)
        for worker in workers:
            worker.join()
    return [seconds[i : i + args.every] for i in range(0, len(seconds) - args.every + 1, args.every)]


def excess(blocks: list[list[float]], first: int, count: int) -> tuple[float, float]:
    """What `count` steps from `first` on take beyond the median step, per step of a block: mean and standard error."""
    usual = median(step for block in blocks for step in block)
    shares = [sum(step - usual for step in block[first : first + count]) / (len(block) * usual) for block in blocks]
    return mean(shares), stdev(shares) / math.sqrt(len(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the checkpoints go; default: the system's temporary directory")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of parameters; AdamW's state is twice as much")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compute-ms", type=float, default=400.0, help="of a step, replaced by sleep")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--window", type=int, default=10, help="steps that a checkpoint may disturb, at most half of --every"
    )
    parser.add_argument("--blocks", type=int, default=10, help="checkpoints that count; two more warm up and end")
    parser.add_argument("--server-cores", type=int, default=1)
    parser.add_argument("--port", type=int, default=29600, help="where the workers meet")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not 1 <= args.window <= args.every // 2 or args.blocks < 2:
        parser.error("--window is from 1 to half of --every, --blocks at least 2")

    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        blocks = measure(args, directory)
    usual = median(step for block in blocks for step in block)
    cost, error = excess(blocks, 0, args.window)
    noise, noise_error = excess(blocks, args.every // 2, args.window)
    if args.json:
        print(json.dumps({"step_seconds": usual, "cost": cost, "error": error, "noise": noise, "blocks": blocks}))
    else:
        print(
            f"step {1e3 * usual:.1f} ms, checkpoints of {3 * args.megabytes:.0f} MB every {args.every} steps cost "
            f"{cost:+.2%} ± {error:.2%} (bar {BAR:.0%}, {len(blocks)} checkpoints); "
            f"noise {noise:+.2%} ± {noise_error:.2%}"
        )
    raise SystemExit(cost > BAR)


if __name__ == "__main__":
    main()
