"""What the examples share: arguments, the choice between Poseidon and plain DDP, batches, the training loop."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from datasets import Dataset


@dataclass
class Parallel:
    """The few names in which Poseidon and torch.distributed differ."""

    rank: int
    world_size: int
    DistributedDataParallel: Callable[[nn.Module], nn.Module]
    DistributedOptimizer: Callable[[torch.optim.Optimizer, nn.Module], torch.optim.Optimizer] | None  # DDP has none
    shutdown: Callable[[], None]


def connect(ddp: bool) -> Parallel:
    """Joins the other workers by the variables that torchrun and `poseidon run` set; alone without them."""
    if ddp:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        wrap = nn.parallel.DistributedDataParallel
        return Parallel(dist.get_rank(), dist.get_world_size(), wrap, None, _leave_ddp)

    import poseidon.torch as poseidon

    poseidon.init()
    return Parallel(
        poseidon.rank(),
        poseidon.world_size(),
        poseidon.DistributedDataParallel,
        poseidon.DistributedOptimizer,
        poseidon.shutdown,
    )


def _leave_ddp() -> None:
    dist.barrier()  # a rank that leaves while another still talks to it makes Gloo abort now and then
    dist.destroy_process_group()


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all examples have; `defaults` gives epochs, batch and lr."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ddp", action="store_true", help="plain torch DistributedDataParallel over Gloo instead of Poseidon"
    )
    parser.add_argument(
        "--overlap", action="store_true", help="Poseidon's DistributedOptimizer: the next forward waits layer by layer"
    )
    parser.add_argument("--epochs", type=int, help="passes over the training set")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--batch", type=int, help="examples per worker and step")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines of output")
    parser.set_defaults(**defaults)
    return parser


def picture_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """`parser` for the examples that classify pictures."""
    pictures = parser(description, **defaults)
    pictures.add_argument("--dataset", default="auto", choices=["auto", "fashion-mnist", "digits"])
    return pictures


def loader(inputs: Tensor, targets: Tensor, batch: int, parallel: Parallel, seed: int = 0) -> DataLoader:
    """This worker's share of the examples, shuffled anew in every epoch (`set_epoch`)."""
    dataset = TensorDataset(inputs, targets)
    share = DistributedSampler(dataset, num_replicas=parallel.world_size, rank=parallel.rank, seed=seed)
    # Without automatic batching the dataset is indexed by a whole batch at once: no collating of single pictures.
    return DataLoader(dataset, sampler=BatchSampler(share, batch, drop_last=False), batch_size=None)


def set_epoch(batches: DataLoader, epoch: int) -> None:
    batches.sampler.sampler.set_epoch(epoch)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader,
    parallel: Parallel,
    args: argparse.Namespace,
) -> None:
    """The usual loop; rank 0 prints the loss on its share of the examples. Outputs are rows × classes."""
    if args.overlap and parallel.DistributedOptimizer is not None:
        optimizer = parallel.DistributedOptimizer(optimizer, model)
    step, started = 0, time.monotonic()
    for epoch in range(args.epochs):
        set_epoch(batches, epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            loss.backward()
            optimizer.step()
            step += 1
            if parallel.rank == 0 and step % args.log_every == 0:
                rate = parallel.world_size * args.batch * step / (time.monotonic() - started)
                print(f"epoch {epoch + 1}  step {step}  loss {loss.item():.6f}  {rate:.0f} examples/s", flush=True)
            if step == args.steps:
                return


def perceptron() -> nn.Module:
    """Three fully connected layers for pictures of 28×28: nearly all parameters can be sent as factors."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, batch: int = 500) -> float:
    """The share of right answers in evaluation mode. Takes the bare module: one rank alone cannot run a wrapped one."""
    model.eval()
    pairs = zip(inputs.split(batch), targets.split(batch), strict=True)
    right = sum(int((model(some).argmax(-1) == answers).sum()) for some, answers in pairs)
    model.train()
    return right / targets.numel()


def print_accuracy(model: nn.Module, data: Dataset) -> None:
    """Prints a wrapped model's accuracy on the test pictures."""
    print(f"{data.name}: test accuracy {accuracy(model.module, data.test_images, data.test_labels):.4f}")
