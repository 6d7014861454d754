"""Children of a fork beside the training, as real programs have them. They inherit all descriptors of the worker."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

OUTLIVES_S = 8.0  # how long a child goes on when its worker has been killed: longer than a failure may go unnoticed


class _Noise(IterableDataset[torch.Tensor]):
    """Batches without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(16, 144)


def _mute(_: int = 0) -> None:
    """The end of the worker's output must be seen although its children live."""
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(silence, number)
    os.close(silence)


def _outlive(parent: int) -> None:
    _mute()
    while os.getppid() == parent:
        time.sleep(0.2)
    time.sleep(OUTLIVES_S)


class Children:
    """`count` workers of a DataLoader and as many plain processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        loader = DataLoader(
            _Noise(), batch_size=None, num_workers=count, multiprocessing_context=context, worker_init_fn=_mute
        )
        self._batches = iter(loader)
        for _ in range(count):
            context.Process(target=_outlive, args=(os.getpid(),), daemon=True).start()

    def feed(self) -> None:
        """Takes a batch of the loader, as a step does."""
        next(self._batches)
