#!/usr/bin/env python3
"""Replicas of a sharded model that are killed at random: `python bench/sharded_kills.py`.

Each machine is a `poseidon run --replica` of its own, whose ranks shard a GPT by FSDP2 over Gloo. It trains undisturbed
first. Then a process of some machine is killed, in the midst of a step or of the recovery from the kill before, until
there were so many kills. Parameters and optimizer state have to have the same bits, on all replicas. The exit status is
1 where they have not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from poseidon.launch import free_port
from sharded import gpt

METHODS = ("exact", "overlap", "bf16", "coding")
TIMEOUT_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each machine")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    wrong = 0
    for method in args.methods.split(","):
        undisturbed, disturbed = (run(args, method, kills) for kills in (0, args.kills))
        same = len({*undisturbed["digests"], *disturbed["digests"]}) == 1
        wrong += not same
        print(
            f"{args.machines} machines of {args.ranks} ranks, {method}: {disturbed['kills']} kills, "
            f"{disturbed['recoveries']} recoveries, {undisturbed['seconds']:.0f} s undisturbed and "
            f"{disturbed['seconds']:.0f} s; {'the same bits' if same else 'OTHER BITS'}",
            flush=True,
        )
    return 1 if wrong else 0


def run(args: argparse.Namespace, method: str, kills: int) -> dict[str, Any]:
    """What the machines say at the end of one training in which so many processes are killed."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, began = Path(name), free_port(), time.monotonic()
        environment = {**os.environ, "POSEIDON_CODING": "on" if method == "coding" else "auto", "OMP_NUM_THREADS": "1"}
        environment |= {"POSEIDON_SECRET": f"{random.SystemRandom().getrandbits(128):x}"}
        machines = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "poseidon", "run", "-n", str(args.ranks), "--on-failure", "rejoin"),
                    *("--max-restarts", str(kills), "--replica", f"{machine}/{args.machines}@127.0.0.1:{port}"),
                    *(__file__, *sys.argv[1:], "--worker", method, "--folder", name),
                ],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=(folder / f"errors-{machine}").open("w"),
            )
            for machine in range(args.machines)
        ]
        try:
            killed = kill_some(folder, random.Random(args.seed), kills, args, machines)
            statuses = [machine.wait(TIMEOUT_S) for machine in machines]
        finally:
            for machine in machines:
                machine.terminate()
        if any(statuses):
            sys.exit(f"{method} failed: " + "\n".join(path.read_text()[-3000:] for path in folder.glob("errors-*")))
        answers = [json.loads(path.read_text()) for path in folder.glob("answer-*")]
        return {
            "digests": [
                "".join(one["digest"] for one in sorted(answers, key=str) if one["machine"] == machine)
                for machine in range(args.machines)
            ],
            "kills": killed,
            "recoveries": max(one["recoveries"] for one in answers),
            "seconds": time.monotonic() - began,
        }


def kill_some(
    folder: Path, draw: random.Random, kills: int, args: argparse.Namespace, machines: list[subprocess.Popen[bytes]]
) -> int:
    """Kills processes, each when training has gone on or begun again after the one before. Returns how many."""
    killed, seen = 0, -1
    while killed < kills and all(machine.poll() is None for machine in machines):
        steps = [int(path.read_text() or -1) for path in folder.glob("step-*")]
        # Not in the last steps: a launcher starts nobody again for a run that has ended.
        if not steps or max(steps) <= seen or max(steps) >= args.steps - 3:
            time.sleep(0.02)
            continue
        time.sleep(draw.uniform(0, 1.5))
        path = folder / f"step-{draw.randrange(args.machines)}-{draw.randrange(args.ranks)}"
        try:
            os.kill(int(path.with_name(path.name.replace("step", "process")).read_text()), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue
        killed += 1
        # Every other kill may come while the others recover from this one.
        seen = max(steps) + (1 if killed % 2 else 0)
    return killed


def work(args: argparse.Namespace) -> None:
    """Trains as one rank of one machine."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import poseidon.torch as poseidon

    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    poseidon.init()
    machine, rank = int(os.environ["POSEIDON_REPLICA"].partition("/")[0]), dist.get_rank()
    (args.folder / f"process-{machine}-{rank}").write_text(str(os.getpid()))
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("shard",))
    model = gpt(args, mesh)
    wrapper = poseidon.DistributedDataParallel(model, wire="bf16" if args.worker == "bf16" else None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.worker == "overlap":
        optimizer = poseidon.DistributedOptimizer(optimizer, wrapper)
    recovery = poseidon.Recovery(wrapper, optimizer, seed=0)
    while recovery.until(args.steps):
        with recovery.attempt():
            (args.folder / f"step-{machine}-{rank}").write_text(str(recovery.step))
            part = poseidon.rank() * dist.get_world_size() + rank
            draw = torch.Generator().manual_seed(1000 * recovery.step + part)
            tokens = torch.randint(0, 1000, (1, 129), generator=draw)
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapper(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    tensors = list(model.parameters())
    tensors += [value for tensor in tensors for _, value in sorted(optimizer.state[tensor].items())]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in parts)).hexdigest()
    answer = {"rank": rank, "machine": machine, "digest": digest, "recoveries": len(recovery.history)}
    (args.folder / f"answer-{machine}-{rank}").write_text(json.dumps(answer))
    poseidon.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
