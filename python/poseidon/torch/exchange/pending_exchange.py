"""One parameter's exchange: what it sends, where it receives the result, and how that becomes the gradient.

`Sending.start` asks once in which form the gradient travels. Each form is a class, which knows what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from poseidon import _core
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.transfer import Rows, Transfer
from poseidon.torch.model.factors import Factors
from poseidon.torch.model.gradient_form import RowsForm
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.compatibility import increment_version
from poseidon.torch.tensors.memory import exchangeable
from poseidon.torch.tensors.ownership import Hold, fading_holders, holders, is_allocated, is_referred_to, sample
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.watched import raw_grad, unnoticed


class PendingUpdates(Protocol):
    """The updates of an optimizer's step() that still wait for their gradients."""

    attempt: int
    """That of `Recovery` in which step() was called."""

    def apply(self, exchanges: Sequence[PendingExchange]) -> None:
        """Updates the parameters whose exchanges have landed."""


@dataclass(eq=False)
class PendingExchange:
    """One parameter's exchange under way, whose result comes whole: in `buffer`, in the layout of the form.

    `in_place`: `buffer` is the memory of `.grad`, or of a parameter on servers.
    """

    entry: SyncedParameter
    buffer: torch.Tensor
    grad: torch.Tensor | None = None  # what `.grad` was at the start
    in_place: bool = False
    absent: bool = False  # this rank contributes nothing
    value: torch.Tensor | None = None  # what came of it: the gradient, or the parameter; None: no rank contributed
    over: bool = False  # `value` is what came of it
    stand_in: PendingGradient | None = None  # what is in `.grad` meanwhile, where that alone reaches the gradient
    covers: bool = False  # it does so from the start
    sampled: torch.Tensor | None = None  # of the gradient at the start, where the program reaches it otherwise
    # Of one that outlives its backward:
    dropped: bool = False  # `.grad` of an absent one has been replaced meanwhile
    zeroed: bool = False  # the user has zeroed `.grad` since step()
    step: PendingUpdates | None = None  # the update to make of it
    holders_of_parameter: int = 0  # tensors that have its memory for this exchange
    attempt: int = -1  # of `Recovery`, in which backward ran; -1: there is none
    hold: Hold | None = None  # of the gradient at the start, if there was one

    @property
    def kept(self) -> bool:
        """Whether `.grad` is still to receive the result."""
        return not self.dropped if self.stand_in is None else raw_grad(self.entry.param) is self.stand_in

    @property
    def overwritten(self) -> torch.Tensor | None:
        """What the exchange writes to, of which autograd has to be told when it is over."""
        return self.grad if self.in_place else None

    @property
    def update_is_due(self) -> bool:
        """Whether the parameter is to change when the exchange is over."""
        return self.step is not None

    def leave_backward(self) -> None:
        """Backward is over, and the exchange goes on."""

    def gradient(self) -> torch.Tensor:
        """With the exchange over: the gradient. It is nobody's where this rank's came too late and no other had one."""
        return self.entry.form.zeros(self.entry.param) if self.value is None else self.value

    def stand_aside(self, stand_in: PendingGradient) -> None:
        """`.grad` is `stand_in` until the exchange is over."""
        self.stand_in = self.entry.param.grad = stand_in

    def uncover(self) -> None:
        """Puts the gradient back in place of what stands in for it, if that is still there."""
        if self.stand_in is not None and raw_grad(self.entry.param) is self.stand_in:
            self.entry.param.grad = self.grad
        self.stand_in = None

    def may_outlive_backward(self) -> bool:
        """Whether the rest of the program may go on before the result is there.

        It may not where it could reach the gradient past `.grad`.
        """
        if self.entry.updater is None:
            return False
        if self.stand_in is not None:
            return self.hold is None or self.hold.lost_others(self.grad)
        return self.hold is None or self.hold.is_sole(self)

    def zero_later(self) -> bool:
        """Notes that `.grad` is to be zeros once the update has used it; False if no update is still to be made."""
        waits = self.step is not None and self.stand_in is not None
        self.zeroed |= waits
        return waits

    def check_untouched(self) -> None:
        """PoseidonError if the gradient was written to while it was exchanged."""
        grad, hold = self.grad, self.hold
        if grad is None:
            return
        written = hold is not None and self._lies_in_grad() and not hold.is_untouched(grad)
        if written or (self.sampled is not None and not torch.equal(sample(grad), self.sampled)):
            raise changed_meanwhile(self.entry)

    def check_kept(self) -> None:
        """With backward just over: PoseidonError if `.grad` was replaced since the exchange has begun."""
        left = self.grad if self.stand_in is None else self.stand_in
        if raw_grad(self.entry.param) is not left and not self.entry.shared:
            raise changed_meanwhile(self.entry, "replaced")

    def _lies_in_grad(self) -> bool:
        """Whether what is sent may lie in the gradient's memory, so that nothing else may write there."""
        return self.in_place

    def arrive(self, stats: _core.LayerStats, transfer: Transfer) -> None:
        """The exchange is over, as `stats` say: puts what came of it where it belongs.

        If no rank contributed that is nothing. It is known now, not before: what this rank has sent may be late.
        """
        entry, present = self.entry, stats.present
        if self.attempt >= 0 and entry.counted:
            entry.note_factor_sum(self.attempt, stats.factor_count)
        if entry.was_absent or not present:
            entry.note_absence(present)
        with torch.no_grad():
            value = self.read(transfer) if present else None
        self.land(value)

    def read(self, transfer: Transfer) -> torch.Tensor:
        """The gradient that has come."""
        return self.grad if self.in_place and self.grad is not None else self.entry.form.read(self.buffer, self.grad)

    def land(self, value: torch.Tensor | None) -> None:
        """Makes `value` the gradient."""
        kept = self.kept
        self.value, self.stand_in, self.over = value, None, True  # what stands in refers to this object
        if kept:
            self.entry.param.grad = value
            if self.entry.updater is not None and value is not None:
                self.entry.note_exchanged(value)


@dataclass(eq=False)
class RowsExchange(PendingExchange):
    """One whose result comes as rows. `buffer` is like them."""

    def read(self, transfer: Transfer) -> torch.Tensor:
        form = self.entry.form
        indices, values = transfer.result_rows(self.entry.layer, self.buffer)
        if indices is None or not isinstance(form, RowsForm):
            return form.read(values, self.grad)
        return form.from_rows(indices, values, self.grad)


@dataclass(eq=False)
class UpdateExchange(PendingExchange):
    """One whose result is the parameter, which servers update. The gradient stays as it was."""

    @property
    def overwritten(self) -> torch.Tensor | None:
        return None  # autograd has been told before

    @property
    def update_is_due(self) -> bool:
        return True

    def may_outlive_backward(self) -> bool:
        # Without a gradient of this rank's, whether there is an update is known only when the exchange is over.
        return not self.absent and super().may_outlive_backward()

    def leave_backward(self) -> None:
        self.uncover()  # what `.grad` shows from now on is the optimizer's to say

    def gradient(self) -> torch.Tensor:
        return self.entry.form.zeros(self.entry.param) if self.grad is None else self.grad

    def _lies_in_grad(self) -> bool:
        return not self.in_place

    def arrive(self, stats: _core.LayerStats, transfer: Transfer) -> None:
        assert self.entry.stored is not None
        with unnoticed([self.entry.whole]):
            super().arrive(stats, transfer)
            self.entry.stored.received()

    def read(self, transfer: Transfer) -> torch.Tensor:
        param = self.entry.param
        return param if self.in_place else param.copy_(self.buffer)

    def land(self, value: torch.Tensor | None) -> None:
        self.value, self.over = value, True


@dataclass(frozen=True)
class Sending:
    """What the exchanges of one backward pass have in common.

    `counts`: whether this rank, if it has no gradient, is among those that the mean is over.
    """

    transfer: Transfer
    divisor: int
    counts: bool = True

    def start(self, entry: SyncedParameter, in_backward: bool = False) -> PendingExchange:
        """Starts the exchange of what the parameter has; InvalidArgument for a gradient that cannot be sent.

        `in_backward`: more hooks are to come, which may write to whatever they can reach. A gradient that they reach
        past `.grad` is copied.
        """
        in_backward = in_backward and not entry.shared  # with another model, whose exchange may be under way, too
        referred = in_backward and raw_grad(entry.param) is not None and is_referred_to(entry.param)
        grad = entry.param.grad
        entry.form.check(entry.name, grad)
        with torch.no_grad():
            if grad is None:
                pending = self._start(entry, None, in_place=False)
                pending.covers = in_backward and not pending.absent
                return pending
            fading = 0 if grad.is_sparse else fading_holders(grad, entry.arrived)
            others = 0 if grad.is_sparse else holders(grad) - 1 - fading
            alone = others == 0 and (grad.is_sparse or is_allocated(grad))
            reached = in_backward and (referred or not alone)
            sampled = sample(grad) if reached and not grad.is_sparse else None
            # Autograd may have made memory the gradient that it has yet to read for other parameters.
            pending = self._start(entry, grad, in_place=not reached and not (fading and others))
            pending.hold, pending.sampled = Hold(grad, alone, fading), sampled
            pending.covers = in_backward and not reached
            return pending

    def _start(self, entry: SyncedParameter, grad: torch.Tensor | None, in_place: bool) -> PendingExchange:
        factors = entry.factors
        if entry.on_servers:
            return self._start_update(entry, grad, in_place)
        if grad is None and not factors:
            return self.start_absent(entry)
        if grad is not None and (rows := _rows_to_send(entry, grad)) is not None:
            if (scale := self.transfer.weight.scale()) != 1:
                rows = (rows[0], rows[1] * scale)
            self.transfer.rows(entry.layer, rows, self.divisor)
            return RowsExchange(entry, rows[1], grad)
        pending = _in_place(entry, grad) if in_place else None
        if factors and entry.may_send(factors.lefts[0].dtype) and (grad is None or not grad.any()):
            pending = pending or PendingExchange(entry, entry.new_buffer(), grad)
            if (scale := self.transfer.weight.scale()) != 1:
                factors = factors.scaled(scale)
            self.transfer.factors(entry.layer, factors, pending.buffer, self.divisor, entry.next_scheme)
            return pending
        if factors and grad is not None:
            entry.note_added()
        if pending is None:
            pending = PendingExchange(entry, entry.new_buffer(), grad)
            if grad is None:
                pending.buffer.zero_()
            else:
                entry.form.write(grad, pending.buffer)
        self._start_dense(entry, pending.buffer, factors)
        return pending

    def _start_dense(self, entry: SyncedParameter, buffer: torch.Tensor, factors: Factors) -> None:
        factors.add_to(buffer)
        entry.begin_dense_exchange()
        factor_count = entry.known_factor_count(buffer)
        if (scale := self.transfer.weight.scale()) != 1:
            buffer.mul_(scale)  # the result is written there
        self.transfer.dense(entry.layer, buffer, self.divisor, entry.next_scheme, factor_count)

    def start_absent(self, entry: SyncedParameter) -> PendingExchange:
        """Takes part in the exchange of a parameter without a gradient."""
        if entry.sends_rows:
            self.transfer.rows(entry.layer, None, self.divisor, self.counts)
            buffer = torch.empty((0, entry.shape[1]), dtype=entry.layout.dtype, device=entry.param.device)
            return RowsExchange(entry, buffer, absent=True)
        pending = PendingExchange(entry, entry.new_buffer(), absent=True)
        self.transfer.absent(entry.layer, pending.buffer, self.divisor, entry.next_scheme, self.counts)
        return pending

    def _start_update(self, entry: SyncedParameter, grad: torch.Tensor | None, from_place: bool) -> PendingExchange:
        param = entry.param.detach()
        others = holders(param) - 1
        in_place = exchangeable(param, entry.layout) and not (entry.rereads is not None and entry.rereads.apart)
        buffer = param if in_place else entry.new_buffer()
        pending = UpdateExchange(entry, buffer, grad, in_place, absent=grad is None)
        if entry.rereads is not None:
            entry.rereads.watch(entry)
        # Before the memory changes: what still needs the parameter as it was must fail, not compute with another.
        increment_version([entry.param])
        if grad is None:
            self.transfer.absent(entry.layer, pending.buffer, self.divisor, entry.next_scheme, self.counts)
            return pending
        from_place = from_place and exchangeable(grad, entry.layout)
        gradient = grad.detach() if from_place else entry.new_buffer().copy_(grad)
        if (scale := self.transfer.weight.scale()) != 1:
            gradient = gradient * scale  # .grad stays this rank's own
        self.transfer.update(entry.layer, gradient, pending.buffer, self.divisor)
        pending.holders_of_parameter = holders(param) - others if in_place else 0
        return pending


def _rows_to_send(entry: SyncedParameter, grad: torch.Tensor) -> Rows | None:
    """None: the gradient travels whole."""
    return entry.form.rows_of(grad) if entry.sends_rows and isinstance(entry.form, RowsForm) else None


def _in_place(entry: SyncedParameter, grad: torch.Tensor | None) -> PendingExchange | None:
    view = None if grad is None or entry.shared else entry.form.view(grad)
    if view is None or not exchangeable(view, entry.layout):
        return None
    return PendingExchange(entry, view, grad, in_place=True)


def changed_meanwhile(entry: SyncedParameter, how: str = "changed in place") -> PoseidonError:
    """The error if a gradient was written to, or otherwise used, while it was exchanged."""
    return PoseidonError(
        f"the gradient of {entry.name} was {how} while it was exchanged: change gradients "
        "after backward(), or in hooks of the parameter itself, which come before its exchange"
    )
