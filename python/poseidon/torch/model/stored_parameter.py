"""What a worker knows about one parameter that the servers hold, and what its `.grad` shows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from poseidon.torch.tensors.ownership import holders, is_allocated, sample
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.watched import without_torch_function


class StoredParameter:
    """One parameter that the servers hold.

    After its update `.grad` can show the mean over the ranks, which is fetched from the servers when it is read, or
    when a backward pass is about to add to it. So all ranks add to the same, whoever has read it.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.update_count = 0
        self.state_count = 0  # arrays beside the value that updates have filled
        self._param = param
        self._seen = (-1, -1)
        self._values: torch.Tensor | None = None  # some of those that it has received
        self._shown: weakref.ref[torch.Tensor] | None = None  # what is in `.grad` instead of this rank's own gradient
        self._shown_version = 0
        self._sampled: torch.Tensor | None = None  # of it, where it is the mean itself
        self._stand_in: weakref.ref[PendingGradient] | None = None  # the last one, wherever it is

    def received(self) -> None:
        """The parameter now holds what the servers hold."""
        self._seen = _state(self._param)
        self._values = _few_values(self._param)

    def updated(self, state_count: int) -> None:
        """The servers have updated it, and so has this worker."""
        self.update_count += 1
        self.state_count = max(self.state_count, state_count)

    def changed_here(self, looks_at_values: bool = False) -> bool:
        """Whether someone else has written to the parameter since.

        PyTorch does not count what `.data` and NumPy write. Some of the values show it, if `looks_at_values`.
        """
        if self._seen != _state(self._param):
            return True
        return looks_at_values and self._values is not None and not torch.equal(_few_values(self._param), self._values)

    def note_gradient(self) -> None:
        """`.grad` is what this rank has pushed."""
        grad: Any = self._param.grad
        if grad is not None:
            grad._poseidon_pushed = grad._version

    def show_mean(self, fetch: Callable[[], torch.Tensor], may_zero: Callable[[], bool]) -> None:
        """From now on `.grad` is the mean, which `fetch` returns and hands to `show_fetched`.

        `may_zero`: whether zeroing it is no change of a gradient that is still to be used. Neither may hold the
        parameter.
        """
        # The parameter holds what is in `.grad` where Python's garbage collector does not see it: no cycle through it.
        reference, of = weakref.ref(self), weakref.ref(self._param)

        def zero_later() -> bool:
            stored, param = reference(), of()
            if param is None or not may_zero():
                return False
            if stored is not None:
                stored._shown = None
            with without_torch_function():  # its values, which may still be on their way, do not matter
                param.grad = torch.zeros_like(param)
            return True

        stand_in = PendingGradient.make(self._param, lambda _: fetch(), zero_later)
        self._stand_in = weakref.ref(stand_in)
        self._show(stand_in, 0)
        self._param.grad = stand_in

    def is_reached(self) -> bool:
        """Whether others than `.grad` have the memory of the gradient that is there, such as one flat tensor of all."""
        grad = self._param.grad
        if grad is None or isinstance(grad, PendingGradient) or grad.layout != torch.strided:
            return False
        return holders(grad) > 1 or not is_allocated(grad)

    def write_mean(self, mean: torch.Tensor) -> None:
        """Puts the mean into the memory of `.grad`."""
        assert self._param.grad is not None
        with torch.no_grad():
            self._param.grad.copy_(mean)

    def note_mean(self) -> None:
        """`.grad` is the mean, and nobody has changed it yet."""
        grad = self._param.grad
        assert grad is not None
        self._show(grad, grad._version, sample(grad))

    def shows_stand_in(self) -> bool:
        """Whether the mean has still to be fetched."""
        return self._shown is not None and isinstance(self._param.grad, PendingGradient)

    def show_fetched(self, mean: torch.Tensor) -> None:
        """Puts the mean in the place of what stands for it, or of what is equal to it."""
        stand_in = None if self._stand_in is None else self._stand_in()
        if stand_in is not None:
            stand_in.value = mean
        if self.shows_stand_in() or self._param.grad is mean:
            self._show(mean, mean._version, sample(mean))
            self._param.grad = mean

    def _show(self, grad: torch.Tensor, version: int, sampled: torch.Tensor | None = None) -> None:
        self._shown, self._shown_version, self._sampled = weakref.ref(grad), version, sampled

    def before_addition(self) -> None:
        """A gradient is about to be added to `.grad`, which then is no stand-in."""
        grad = self._param.grad
        if isinstance(grad, PendingGradient):
            self._param.grad = grad.resolve()
        self._shown = None

    def gradient_changed(self) -> bool:
        """Whether `.grad` has been written to or replaced since; cleared it may be."""
        grad = self._param.grad
        if grad is None:
            return False
        if self._shown is None or grad is not self._shown():
            return getattr(grad, "_poseidon_pushed", None) != grad._version
        if isinstance(grad, PendingGradient):
            return False
        # NumPy and `.data` write without raising the version.
        return grad._version != self._shown_version or not _is_same(grad, self._sampled)


def hold_other_values(every: Iterable[StoredParameter]) -> bool:
    """Whether some of these hold other values than they have received, by one comparison on each device."""
    values: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for stored in every:
        if stored._values is not None:
            now, then = values.setdefault(stored._values.device, ([], []))
            now.append(_few_values(stored._param).to(stored._values.device))
            then.append(stored._values)
    return any(not torch.equal(torch.cat(now), torch.cat(then)) for now, then in values.values())


def _state(param: torch.Tensor) -> tuple[int, int]:
    """Another one when something was written through PyTorch, or the memory is another. To ask is no use of it."""
    with without_torch_function():
        return param._version, param.data_ptr()


def _few_values(param: torch.Tensor) -> torch.Tensor:
    """Copies of about 64, as bytes, in a few microseconds. To look is no use of the parameter."""
    with without_torch_function():
        values = param.detach()
    if not values.is_contiguous():
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))  # as they lie
    flat = values.view(-1) if values.is_contiguous() else values.flatten()
    return flat[:: flat.numel() // 64 | 1].clone().view(torch.uint8)


def _is_same(grad: torch.Tensor, sampled: torch.Tensor | None) -> bool:
    return sampled is not None and torch.equal(sample(grad), sampled)
