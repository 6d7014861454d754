"""Communication hooks in the form that torch's class takes (`register_comm_hook`).

A hook does the communication itself, over torch.distributed. It gets buckets of gradients at the end of backward.
Poseidon's exchange, and with it all schemes, is not used. Hooks that only do what Poseidon's exchange can do, too, are
not run: Poseidon does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Bucket:
    """Gradients in one flat tensor, as a hook sees them: the methods of `torch.distributed.GradBucket`."""

    def __init__(self, index: int, last: bool, params: Sequence[torch.Tensor], filled: bool) -> None:
        self._index, self._last, self._params = index, last, list(params)
        first = self._params[0]
        self._buffer = torch.zeros(sum(p.numel() for p in params), dtype=first.dtype, device=first.device)
        for view, param in zip(self.gradients(), self._params, strict=True):
            if filled and param.grad is not None:
                view.copy_(param.grad)

    def index(self) -> int:
        """The number of this bucket in its backward pass, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of its backward pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """All gradients, one after the other, in one dimension."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces `buffer()` by a tensor of the same size."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer()`, one for each parameter."""
        sizes = [param.numel() for param in self._params]
        pieces = self._buffer.split(sizes)
        return [piece.view(param.shape) for piece, param in zip(pieces, self._params, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that the gradients belong to."""
        return self._params


class HookedTransfer:
    """Runs a communication hook on a model's gradients instead of Poseidon's exchange."""

    def __init__(self, state: object, hook: CommHook, bucket_bytes: int) -> None:
        self.state, self.hook = state, hook
        self._bucket_bytes = bucket_bytes

    def run(self, entries: Sequence[SyncedParameter], control: Control, contributes: bool = True) -> None:
        """Collective: makes every `.grad` what the hook returns; those that no rank has stay as they are.

        Not `contributes`, in `join()`: takes part for the other ranks with zeros, and changes no `.grad`.
        """
        present = control.sum([int(contributes and entry.param.grad is not None) for entry in entries])
        params = [entry.param for entry, ranks in zip(entries, present, strict=True) if ranks]
        groups = list(_grouped(params, self._bucket_bytes))
        with torch.no_grad():
            for index, group in enumerate(groups):
                bucket = Bucket(index, index == len(groups) - 1, group, contributes)
                result = self.hook(self.state, bucket).wait()
                if not contributes:
                    continue
                bucket.set_buffer(_flat(result, bucket.buffer()))
                for param, value in zip(group, bucket.gradients(), strict=True):
                    if param.grad is None:
                        param.grad = torch.empty_like(param, requires_grad=False)
                    param.grad.copy_(value)


def _flat(result: Any, like: torch.Tensor) -> torch.Tensor:
    value = result[0] if isinstance(result, (list, tuple)) else result
    if not isinstance(value, torch.Tensor) or value.numel() != like.numel():
        raise InvalidArgument(
            "the communication hook must return a Future of one tensor as large as bucket.buffer(), not of "
            f"{type(value).__name__}: return the Future of what the gradients are to be"
        )
    return value.reshape(-1)


def _grouped(params: Sequence[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    """In the given order, each group of one dtype and, but for a single larger parameter, of at most so many bytes."""
    group: list[torch.Tensor] = []
    size = 0
    for param in params:
        if group and (param.dtype != group[0].dtype or size + param.nbytes > most_bytes):
            yield group
            group, size = [], 0
        group.append(param)
        size += param.nbytes
    if group:
        yield group


class _NotCallable(InvalidArgument, TypeError):
    """The error that torch's class raises."""


def check_hook(hook: Any) -> None:
    """InvalidArgument for what cannot be a communication hook."""
    if not callable(hook):
        raise _NotCallable(
            f"hook is a {type(hook).__name__} and must be callable: pass a function of (state, bucket) that returns a "
            "Future"
        )
    if len(inspect.signature(hook).parameters) < 2:
        raise InvalidArgument("hook must take (state, bucket) and return a torch.futures.Future: it takes less")


def is_all_reduce(hook: Any) -> bool:
    """Whether the hook only averages the gradients, which Poseidon does anyway."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return hook is default_hooks.allreduce_hook


def wire_format_of(hook: Any) -> str | None:
    """The wire format that does what the hook does; None if there is none."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    formats = {default_hooks.fp16_compress_hook: "fp16", default_hooks.bf16_compress_hook: "bf16"}
    return formats.get(hook)
