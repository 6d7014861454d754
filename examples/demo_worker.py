"""One worker of the demo: trains, tells the launching process about its progress, and saves what it recorded.

`demo.py` starts it; the training itself is an ordinary PyTorch script.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

import common
import datasets
from poseidon.report import RankRecord, Span, rank_record, save_rank

EVENT_MARK = "demo-event "  # begins the lines that demo.py reads
STEPS_BETWEEN_EVENTS = 10
RECORDED_STEPS = 40  # for the timeline and the trace: the last ones of the run


def network() -> nn.Sequential:
    """Convolutions, which go by the parameter server, and large fully-connected layers, which go by factors."""
    layers: list[tuple[str, nn.Module]] = []
    channels = 1
    for index, width in enumerate((24, 48, 64), start=1):
        layers += [
            (f"conv{index}", nn.Conv2d(channels, width, 3, padding=1)),
            (f"relu{index}", nn.ReLU()),
            (f"pool{index}", nn.MaxPool2d(2)),
        ]
        channels = width
    layers += [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(channels * 3 * 3, 512)),
        ("relu4", nn.ReLU()),
        ("fc2", nn.Linear(512, 512)),
        ("relu5", nn.ReLU()),
        ("fc3", nn.Linear(512, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def tell(event: str, **fields: Any) -> None:
    """Tells the launching process something, on a line of standard output."""
    print(EVENT_MARK + json.dumps({"event": event, **fields}), flush=True)


class Recorder:
    """The spans of this rank's recorded steps."""

    def __init__(self, step_count: int) -> None:
        self.spans: list[Span] = []
        self.step = 0
        self.first_step = max(0, step_count - RECORDED_STEPS)

    @property
    def active(self) -> bool:
        """Whether the current step is recorded."""
        return self.step >= self.first_step

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Records what the block takes, in recorded steps."""
        start_ns = time.monotonic_ns()
        yield
        if self.active:
            self.spans.append(Span(kind, self.step, start_ns, time.monotonic_ns()))


class Training:
    """The usual loop, with progress and spans."""

    def __init__(
        self, model: nn.Module, data: datasets.Dataset, parallel: common.Parallel, args: argparse.Namespace
    ) -> None:
        self.model = model
        self.data = data
        self.parallel = parallel
        self.ddp = args.ddp
        self.epoch_count = args.epochs
        self.images_per_step = args.batch * parallel.world_size
        self.batches = common.loader(data.train_images, data.train_labels, args.batch, parallel, args.seed)
        self.steps_per_epoch = min(len(self.batches), args.steps or len(self.batches))
        step_count = args.epochs * self.steps_per_epoch
        parameters = model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        self.rates = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, args.lr, total_steps=step_count, pct_start=0.2)
        self.recorder = Recorder(step_count)

    def run(self) -> None:
        for epoch in range(1, self.epoch_count + 1):
            common.set_epoch(self.batches, epoch)
            losses, duration_s = self._epoch(epoch)
            if self.parallel.rank == 0:
                data = self.data
                accuracy = common.accuracy(self.model.module, data.test_images, data.test_labels)
                rate = self.images_per_step * len(losses) / duration_s
                tell("epoch", number=epoch, losses=losses, accuracy=accuracy, images_per_s=rate, duration_s=duration_s)

    def _epoch(self, epoch: int) -> tuple[list[float], float]:
        losses: list[float] = []
        started = time.monotonic()
        for images, labels in islice(self.batches, self.steps_per_epoch):
            losses.append(self._step(images, labels))
            if self.parallel.rank == 0 and (len(losses) % STEPS_BETWEEN_EVENTS == 0 or len(losses) == 1):
                rate = self.images_per_step * len(losses) / (time.monotonic() - started)
                total = self.steps_per_epoch
                tell("step", epoch=epoch, step=len(losses), step_count=total, loss=losses[-1], images_per_s=rate)
        return losses, time.monotonic() - started

    def _step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        recorder = self.recorder
        if recorder.step == recorder.first_step and not self.ddp:
            self.model.record(True)
        self.optimizer.zero_grad()
        with recorder.span("forward"):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        with recorder.span("backward"):
            loss.backward()
        with recorder.span("update"):
            self.optimizer.step()
        self.rates.step()
        recorder.step += 1
        return loss.item()


def record_of(training: Training) -> RankRecord:
    """This rank's part of the report; with plain DDP only the passes are known."""
    parallel, recorder = training.parallel, training.recorder
    host = socket.gethostname()
    if training.ddp:
        return RankRecord(parallel.rank, host, 0, [], recorder.spans)
    model: Any = training.model
    plan, steps = model.plan(), model.recorded_steps()
    return rank_record(parallel.rank, host, parallel.world_size, plan, steps, recorder.spans, recorder.first_step)


def main() -> None:
    parser = common.picture_parser(__doc__, epochs=3, batch=32, lr=0.1)
    parser.add_argument("--records", required=True, help="folder for what each rank recorded")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    data = datasets.load(args.dataset)
    model = parallel.DistributedDataParallel(network())
    if parallel.rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        tell("start", dataset=data.name, parameter_count=count)

    training = Training(model, data, parallel, args)
    training.run()
    save_rank(record_of(training), args.records)
    parallel.shutdown()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
