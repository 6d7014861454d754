"""What checkpoints of the servers cost a training step: with against without, in turns.

Two workers push gradients to two servers, of which one saves parameters and optimizer state every --every steps. A
block of so many steps goes to the one, the next to the other; compute is replaced by sleep. Reported is the median of
the paired differences of neighbouring blocks, as a share of the median block without checkpoints. Exit status 1 above
the bar.

    python bench/checkpoint_cost.py --directory /shared/checkpoints
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
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


def stepper(address: str, job: str, rank: int, port: int, args: argparse.Namespace) -> Callable[[], None]:
    """One training step on one of the servers."""
    exchange = poseidon.connect(
        rank=rank, world_size=WORKERS, master_addr="127.0.0.1", master_port=port, servers=[address], job=job
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


def work(rank: int, addresses: list[str], ports: list[int], args: argparse.Namespace, results: Any) -> None:
    """A worker's main: rank 0 reports the seconds of each pair of blocks."""
    steps = [
        stepper(*pair, rank, port, args)
        for pair, port in zip(zip(addresses, ("plain", "saved"), strict=True), ports, strict=True)
    ]
    pairs = []
    for block in range(args.blocks + 1):
        seconds = [0.0, 0.0]
        for side in (0, 1) if block % 2 == 0 else (1, 0):
            begin = time.perf_counter()
            for _ in range(args.every):
                steps[side]()
            seconds[side] = time.perf_counter() - begin
        pairs.append(seconds)
    if rank == 0:
        results.put(pairs[1:])  # the first one allocates


def measure(args: argparse.Namespace, directory: str) -> list[list[float]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with ExitStack() as stack:
        saving = ["--checkpoint-dir", directory, "--checkpoint-every", str(args.every)]
        cores = ["--server-cores", str(args.server_cores)]
        addresses = [serving(stack, *cores), serving(stack, *cores, *saving)]
        ports = [args.port, args.port + 1]
        workers = [context.Process(target=work, args=(r, addresses, ports, args, results)) for r in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")
        return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the checkpoints go; default: the system's temporary directory")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of parameters; AdamW's state is twice as much")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compute-ms", type=float, default=200.0, help="of a step, replaced by sleep")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--blocks", type=int, default=5, help="of --every steps, on each server")
    parser.add_argument("--server-cores", type=int, default=1)
    parser.add_argument("--port", type=int, default=29600, help="and the next one: where the workers meet")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        pairs = measure(args, directory)
    plain = median(without for without, _ in pairs)
    cost = median(saved - without for without, saved in pairs) / plain
    if args.json:
        print(json.dumps({"step_seconds": plain / args.every, "cost": cost, "bar": BAR, "pairs": pairs}, indent=2))
    else:
        print(
            f"step {1e3 * plain / args.every:.1f} ms, checkpoints of {3 * args.megabytes:.0f} MB every {args.every} "
            f"steps cost {cost:+.2%} (bar {BAR:.0%}, {len(pairs)} pairs)"
        )
    raise SystemExit(cost > BAR)


if __name__ == "__main__":
    main()
