"""Factors of compiled models: are plan and bytes those of eager mode, and the parameters those of torch's class?

Two workers on this machine train each model with `scheme=auto`: eager, compiled, and compiled in torch's class. The
inputs of the convolutional ones are small, so that this takes minutes; their fully connected layers are the original
ones. Parameters are compared after the first step. Later steps amplify its rounding: after four of ResNet-18 biases
differ by 2e-2, in eager mode, too. Then one worker trains the compiled model bare, bare once more, and wrapped, step by
step in turns. Its overhead is the median of the paired differences in processor time as a share of the bare step; that
of the two bare ones says how far such a figure can be trusted.

    python bench/compiled_factors.py [--models mlp resnet18 vgg19] [--backend inductor]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import poseidon.torch as poseidon
from poseidon.launch import free_port

SIDE = 32  # of pictures
ROWS = 8  # of one worker's batch
VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0)  # 0: pooling
Found = dict[str, Any]


class Model(nn.Module):
    """One of the program's own: of torch's containers `compile()` compiles nothing."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


class Residual(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.past = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(y + self.past(x))


def mlp() -> nn.Module:
    return Model(nn.Flatten(), nn.Linear(3 * SIDE**2, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), head(2048))


def resnet18() -> nn.Module:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    return Model(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(512))


def vgg19() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG19:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        else:
            layers.append(nn.MaxPool2d(2))
        channels = width or channels
    whole = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return Model(*layers, *whole, nn.ReLU(), head(4096))


def head(inputs: int) -> nn.Module:
    return nn.Linear(inputs, 1000)


MODELS = {"mlp": mlp, "resnet18": resnet18, "vgg19": vgg19}


def built(name: str, backend: str) -> nn.Module:
    """The model with its first values; compiled unless `backend` is empty."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODELS[name]()
    if backend:
        module.compile(backend=backend)
    return module


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(ROWS, 3, SIDE, SIDE, generator=generator),
        torch.randint(1000, (ROWS,), generator=generator),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimizer.step()


def trained(wrapper: Any, name: str, backend: str, rank: int, steps: int) -> tuple[Any, list[torch.Tensor]]:
    """The wrapped model after some steps, and copies of its parameters after the first one."""
    model = wrapper(built(name, backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train_step(model, optimizer, batch(0, rank))
    first = [param.detach().clone() for param in model.parameters()]
    for step in range(1, steps):
        train_step(model, optimizer, batch(step, rank))
    return model, first


def sent(model: Any) -> list[tuple[str, str, int]]:
    """Each layer's scheme and bytes in the last step. Those that travel together share theirs."""
    return sorted((one.name, one.scheme, one.bytes) for one in model.synchronization_stats())


def compare(rank: int, args: argparse.Namespace, name: str, port: int, folder: str) -> None:
    """One worker of two. Rank 0 leaves what it found in `folder`."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    poseidon.init(rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, local_rank=rank)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    eager, _ = trained(poseidon.DistributedDataParallel, name, "", rank, args.steps)
    wanted = sent(eager)
    del eager
    compiled, ours = trained(poseidon.DistributedDataParallel, name, args.backend, rank, args.steps)
    found = sent(compiled)
    del compiled
    _, theirs = trained(nn.parallel.DistributedDataParallel, name, args.backend, rank, 1)
    far = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True))
    factors = sum(scheme in ("sfb", "sharded_factors") for _, scheme, _ in found)
    if rank == 0:
        torch.save({"alike": found == wanted, "factors": factors, "far": far}, Path(folder) / "found")
    poseidon.shutdown()
    os._exit(0)  # gloo's threads may wait for the interpreter that ends


def overhead(_: int, args: argparse.Namespace, name: str, folder: str) -> None:
    """One worker alone: the share of a compiled step that wrapping adds, and what a second bare model seems to add."""
    torch.set_num_threads(1)
    poseidon.init(rank=0, world_size=1)
    models: list[Any] = [built(name, args.backend) for _ in range(3)]  # nothing is compiled before the first step
    models[2] = poseidon.DistributedDataParallel(models[2])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-6) for model in models]
    rounds = []
    for step in range(args.rounds + 3):
        taken = [0.0] * len(models)
        for turn in range(len(models)):
            which = (turn + step) % len(models)
            begin = time.process_time()
            train_step(models[which], optimizers[which], batch(0, 0))
            taken[which] = time.process_time() - begin
        rounds.append(taken)
    bare = median(taken[0] for taken in rounds[3:])  # the first ones compile
    other, wrapped = (median(taken[which] - taken[0] for taken in rounds[3:]) / bare for which in (1, 2))
    torch.save({"overhead": wrapped, "of bare": other}, Path(folder) / "overhead")
    poseidon.shutdown()


def measure(args: argparse.Namespace, name: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (args, name, free_port(), folder), nprocs=2)
        mp.spawn(overhead, (args, name, folder), nprocs=1)
        return torch.load(Path(folder) / "found") | torch.load(Path(folder) / "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each for the overhead")
    args = parser.parse_args()
    met = True
    for name in args.models:
        found = measure(args, name)
        good = found["alike"] and found["factors"] > 0 and found["far"] < 1e-5 and found["overhead"] < 0.01
        met &= good
        print(
            f"{name}: plan and bytes {'as' if found['alike'] else 'NOT as'} in eager mode, {found['factors']} layers "
            f"by factors, parameters within {found['far']:.1e} of torch's class after a step, overhead of one worker "
            f"{found['overhead']:+.2%} (of another bare model {found['of bare']:+.2%}): {'met' if good else 'missed'}",
            flush=True,
        )
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
