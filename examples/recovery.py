"""A training that survives the loss of any worker: kill one with `kill -9` and look at the losses.

poseidon run -n 4 --on-failure rejoin examples/recovery.py
poseidon run -n 4 --on-failure rejoin examples/recovery.py --kill-rank 2 --kill-step 100
python examples/recovery.py --snapshots FOLDER      # stop it and start it again: it goes on
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

import common
import datasets
import poseidon.torch as poseidon


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="auto", choices=["auto", "fashion-mnist", "digits"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="examples per worker and step")
    parser.add_argument("--overlap", action="store_true", help="with Poseidon's DistributedOptimizer")
    parser.add_argument("--snapshots", help="a folder from which all go on when everybody has been started again")
    parser.add_argument("--kill-rank", type=int, help="this worker kills itself once, at --kill-step")
    parser.add_argument("--kill-step", type=int, default=100)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = parse()
    poseidon.init()
    data = datasets.load(args.dataset)
    torch.manual_seed(1)
    model = poseidon.DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10))
    )
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if args.overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    recovery = poseidon.Recovery(model, optimizer, scheduler, seed=1, directory=args.snapshots)
    replaces_another = recovery.step > 0

    while recovery.until(args.steps):
        with recovery.attempt():
            step, rank, size = recovery.step, poseidon.rank(), poseidon.world_size()
            # A step's examples follow from its number alone, so they are the same when it is made again.
            rows = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(step))
            mine = rows[: args.batch * size].chunk(size)[rank]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.train_images[mine]), data.train_labels[mine])
            if (rank, step) == (args.kill_rank, args.kill_step) and not replaces_another:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if rank == 0 and (step + 1) % args.log_every == 0:
                print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)

    if poseidon.rank() == 0:
        common.print_accuracy(model, data)
    poseidon.shutdown()


if __name__ == "__main__":
    main()
