"""Communication hooks in the form that torch's class takes (`register_comm_hook`).

A hook does the communication itself, over torch.distributed. It gets buckets of gradients at the end of backward.
Poseidon's exchange, and with it all schemes, is not used. Hooks that only do what Poseidon's exchange can do, too, are
not run: Poseidon does it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter

MEAN = "mean"
SCHEME = "powersgd"
_LEAST_RATE = 2  # the scheme takes no matrix that becomes smaller by less

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


def what_it_does(hook: Any) -> str:
    """Of a hook of torch's that Poseidon can stand for: MEAN, a wire format, or the scheme powersgd. Else empty."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    known = {
        default_hooks.allreduce_hook: MEAN,
        default_hooks.fp16_compress_hook: "fp16",
        default_hooks.bf16_compress_hook: "bf16",
        powerSGD_hook.powerSGD_hook: SCHEME,
    }
    return known.get(hook, "")


def unlike_scheme(state: Any) -> str | None:
    """What of this state the scheme cannot do, and why; None if it can do all of a `PowerSGDState`.

    A state of another class is one of these: torch's hook takes it until the first backward pass, and fails there.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    if not isinstance(state, PowerSGDState):
        return f"the class {type(state).__name__}, and the scheme needs a PowerSGDState"
    if not state.use_error_feedback:
        return "use_error_feedback=False, and the scheme always keeps what it has not sent"
    if not state.warm_start:
        return "warm_start=False, and the scheme always begins with the vectors of the last step"
    if state.orthogonalization_epsilon:
        return f"orthogonalization_epsilon={state.orthogonalization_epsilon}, and the scheme adds nothing to lengths"
    if state.min_compression_rate < _LEAST_RATE:
        return f"min_compression_rate={state.min_compression_rate}, and the scheme takes {_LEAST_RATE} or more"
    if state.error_dict:
        return "residuals of torch's hook, which the scheme cannot take over"
    return None


def is_open(entry: SyncedParameter) -> bool:
    """Whether nobody has asked for a scheme of this parameter, so that a hook may."""
    return entry.asked.scheme == "auto" and not entry.asked.lossy


class PowerSGDHook:
    """What a `PowerSGDState` asks for. It counts the steps in `state.iter`, as torch's hook does."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._first_iter = state.iter
        self._layers: Sequence[SyncedParameter] = ()
        self._is_exact = False
        self._numbers = (0, 0)  # of a step, before and after compression

    @property
    def rank(self) -> int:
        """The rank of what a worker sends."""
        return int(self._state.matrix_approximation_rank)

    def describe(self) -> str:
        """What must be the same on all ranks."""
        state = self._state
        return (
            f"powerSGD_hook, rank {self.rank}, step {self._first_iter}, "
            f"start_powerSGD_iter {state.start_powerSGD_iter}, min_compression_rate {state.min_compression_rate}"
        )

    def choose_layers(self, entries: Sequence[SyncedParameter]) -> Sequence[SyncedParameter]:
        """Makes the parameters that the hook compresses, and whose scheme is open, take the scheme. Returns them."""
        self._layers = [entry for entry in entries if self._compresses(entry)]
        for entry in self._layers:
            entry.compress_by(SCHEME, self.rank)
        before = sum(entry.element_count for entry in entries)
        saved = sum(entry.element_count - self._compressed_count(entry) for entry in self._layers)
        self._numbers = (before, before - saved)
        return self._layers

    def _compressed_count(self, entry: SyncedParameter) -> int:
        rows = entry.asked.matrix_rows
        return (rows + entry.element_count // rows) * self.rank

    def _compresses(self, entry: SyncedParameter) -> bool:
        if not is_open(entry) or entry.dtype != "float32" or not entry.asked.matrix_rows:
            return False
        return bool(self._compressed_count(entry) * self._state.min_compression_rate < entry.element_count)

    def begin_run(self, client: _core.Client, attempt: int) -> None:
        """An exchange of all layers begins. `attempt`: that of `Recovery`, or -1 if there is none."""
        state = self._state
        done = state.iter if attempt < 0 else self._first_iter + attempt
        was_exact, self._is_exact = self._is_exact, done < state.start_powerSGD_iter
        if was_exact or self._is_exact:
            for layer in self._layers:
                if layer.kept_count and not layer.on_servers:
                    client.choose(layer.layer, "ps" if self._is_exact else "auto", 0)
        state.iter = done + 1
        if not self._is_exact:
            self._count_numbers()

    def _count_numbers(self) -> None:
        state = self._state
        state.total_numel_before_compression += self._numbers[0]
        state.total_numel_after_compression += self._numbers[1]
        if state.iter < state.next_stats_report:
            return
        rate, before, after = state.compression_stats()
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency
        logger = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        logger.info("Compression stats: iter %s, numbers %s, compressed %s, rate %s", state.iter, before, after, rate)
