"""Updates on the worker: layer by layer, as gradients arrive, or all at once.

`WorkerUpdate` is one optimizer's part of a model's `Synchronizer`. step() only notes what has to be done with the
gradients that are in flight. The next use of a parameter, as a rule the next forward pass, first waits for its gradient
and updates it. `WholeStep` is for optimizers that are not known to update each parameter on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.torch.exchange.pending_exchange import PendingExchange
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.partial_step import hyperparameters_of, partial_step, plain_step, whole_step
from poseidon.torch.optimizer.succession import Tenure
from poseidon.torch.optimizer.undo import UpdateUndo
from poseidon.torch.optimizer.wrapper import loss_of
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import raw_grad


class PendingStep:
    """One call of step(): the updates that wait for their gradients will have the results of that moment."""

    def __init__(
        self, optimizer: Optimizer, clipping: StepClipping | None, attempt: int = 0, undo: UpdateUndo | None = None
    ) -> None:
        self.attempt = attempt  # of `Recovery`, in which step() was called
        self._undo = undo
        self._optimizer = optimizer
        self._hyperparameters = hyperparameters_of(optimizer)
        self._clipping = clipping
        self._places = {
            param: (number, index)
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }

    def update(self, params: Iterable[torch.Tensor]) -> None:
        """Updates these parameters, which have their gradients."""
        chosen = sorted(params, key=self._places.__getitem__)
        if not chosen:
            return
        if self._undo is not None:
            self._undo.save(chosen, self.attempt)
        if self._clipping is not None:
            self._clipping.clip(chosen)
        groups: list[list[torch.Tensor]] = [[] for _ in self._hyperparameters]
        for param in chosen:
            groups[self._places[param][0]].append(param)
        partial_step(self._optimizer, self._hyperparameters, groups)

    def apply(self, exchanges: Sequence[PendingExchange]) -> None:
        """Updates the parameters whose exchanges have landed."""
        ready = {pending.entry: pending.value for pending in exchanges if pending.value is not None}
        if not ready:
            return
        cleared = {entry.param: entry.param.grad for entry, value in ready.items() if entry.param.grad is not value}
        for entry, value in ready.items():
            if entry.param in cleared:
                entry.param.grad = value
            if isinstance(entry.param, Shard):
                entry.param.show()
        self.update(entry.whole for entry in ready)
        for param, grad in cleared.items():
            param.grad = grad
        for pending in exchanges:
            if pending.zeroed and pending.value is not None:
                pending.value.zero_()


class WorkerUpdate:
    """The updates of one optimizer's parameters, each on its own. Used from the thread that trains.

    `sync` is None with one worker: all gradients are there when step() is called.
    """

    exclusive = True

    def __init__(
        self, optimizer: Optimizer, sync: Synchronizer | None, clipping: Clipping | None, tenure: Tenure
    ) -> None:
        self.tenure = tenure
        self._optimizer = optimizer
        self._sync = sync
        self._clipping = clipping
        self.entries: list[SyncedParameter] = []
        self.undo: UpdateUndo | None = None  # what makes its updates undone, if anything has to

    def take(self, entries: Sequence[SyncedParameter]) -> None:
        """From now on the end of backward does not wait for these parameters. InvalidArgument for one it cannot."""
        self.tenure.note_sparse(entries)
        self.entries += entries
        for entry in entries:
            entry.update_by(self)

    def end(self, kept: Collection[SyncedParameter]) -> None:
        """See `Update`."""
        for entry in self.entries:
            if entry.updater is self:
                entry.update_by(None)

    def step(self) -> None:
        """The optimizer's step(): now where gradients are there, and for the others when they are."""
        self._settle([entry for entry, pending in self._in_flight().items() if pending.step is not None])
        if self._sync is not None:
            self._sync.confirm_attempt()
        if self._sync is not None and self._sync.some_alone:
            self._check_alone(self._sync)
        if self._clipping is not None and self._clipping.needs_all:
            self.synchronize()
        self._bring_gradients_of_others(self._in_flight())
        clipping = None if self._clipping is None else self._clipping.begin_step(self._optimizer.param_groups)
        members = dict.fromkeys(param for group in self._optimizer.param_groups for param in group["params"])
        due = [pending for entry, pending in self._in_flight().items() if entry.whole in members and pending.kept]
        if not due and clipping is None and self.undo is None:
            plain_step(self._optimizer)
            return
        attempt = 0 if self._sync is None else self._sync.layers.attempt
        step = PendingStep(self._optimizer, clipping, attempt, self.undo)
        later = {pending.entry.whole for pending in due}
        step.update(param for param in members if param not in later and param.grad is not None)
        if self._sync is not None:
            self._sync.flights.postpone(due, step)

    def _in_flight(self) -> dict[SyncedParameter, PendingExchange]:
        """The exchanges of its parameters that backward has not waited for."""
        if self._sync is None:
            return {}
        found = ((entry, self._sync.flights.in_flight(entry)) for entry in self.entries)
        return {entry: pending for entry, pending in found if pending is not None}

    def _check_alone(self, sync: Synchronizer) -> None:
        """PoseidonError if step() would use gradients of this rank alone."""
        alone = next((entry for entry in self.entries if entry.trained_alone()), None)
        if alone is not None:
            raise PoseidonError(
                f"the gradient of {alone.name} is this rank's own, of a forward pass that went past the wrapper: call "
                "the DistributedDataParallel, not its module, or clear the gradients before the next backward pass"
            )
        sync.some_alone = False

    def _bring_gradients_of_others(self, exchanges: Mapping[SyncedParameter, PendingExchange]) -> None:
        """Ends exchanges of gradients that the program has given to other parameters.

        Otherwise the optimizer would end them in its step, with others that are to be made later.
        """
        for entry in self.entries:
            grad = raw_grad(entry.param)
            own = exchanges.get(entry)
            if isinstance(grad, PendingGradient) and (own is None or grad is not own.stand_in):
                entry.param.grad = grad.resolve()

    def _settle(self, entries: Sequence[SyncedParameter]) -> None:
        if self._sync is not None:
            self._sync.flights.settle(entries)

    def synchronize(self) -> None:
        """Waits until all gradients, and after step() all updates, are in place."""
        self._settle(self.entries)


class WholeStep:
    """The updates of one optimizer that may need all gradients: its whole step(), once they are there.

    Such optimizers may skip a step, look at all gradients, keep what they have counted, call their closure twice, or
    communicate. All that is as without Poseidon's optimizer: the end of backward waits for the exchange. Used from the
    thread that trains.
    """

    exclusive = False

    def __init__(self, optimizer: Optimizer, clipping: Clipping | None, tenure: Tenure) -> None:
        self.tenure = tenure
        self.entries: list[SyncedParameter] = []
        self._optimizer = optimizer
        self._clipping = clipping

    def take(self, entries: Sequence[SyncedParameter]) -> None:
        """InvalidArgument for a parameter that it cannot clip."""
        self.tenure.note_sparse(entries)
        self.entries += entries

    def end(self, kept: Collection[SyncedParameter]) -> None:
        """See `Update`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step(), with what it returns."""
        if self._clipping is None:
            return whole_step(self._optimizer, *(() if closure is None else (closure,)))
        loss = loss_of(closure)  # gradients can be clipped only once they are there
        with torch.no_grad():
            clipping = self._clipping.begin_step(self._optimizer.param_groups)
            if clipping is not None:
                params = [param for group in self._optimizer.param_groups for param in group["params"]]
                clipping.clip([param for param in params if param.grad is not None])
        whole_step(self._optimizer)
        return loss


CLIPS = ("gathered", "previous")
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class StepClipping:
    """One step's scaling of gradients, by the total norm `norm`, as they arrive."""

    def __init__(self, max_norm: float, norm: torch.Tensor) -> None:
        self.norms: dict[torch.Tensor, torch.Tensor] = {}  # of each gradient as it was, by parameter
        self._scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)

    def clip(self, params: Sequence[torch.Tensor]) -> None:
        """Scales the gradients of these parameters in place."""
        for param in params:
            grad = param.grad
            assert grad is not None
            self.norms[param] = torch.linalg.vector_norm(grad)
            grad.mul_(self._scale.to(grad.device))


class Clipping:
    """Limits the 2-norm of all of an optimizer's gradients together to `max_norm`.

    With `clip` "gathered" it uses the norm of this step's gradients, so no update is made before all have arrived. With
    "previous" it uses the norm of the previous step's gradients: an approximation for which nothing has to wait.
    """

    def __init__(self, max_norm: float, clip: str) -> None:
        if not max_norm > 0:
            raise InvalidArgument(f"max_norm is {max_norm}: it bounds a norm and must be more than 0")
        self._max_norm = float(max_norm)
        self._previous: StepClipping | None = None
        self._uses_previous = clip == "previous"

    @property
    def needs_all(self) -> bool:
        """Whether the next step's scale is only known when all gradients are there."""
        return not self._uses_previous or not (self._previous and self._previous.norms)

    def begin_step(self, param_groups: Sequence[Mapping[str, Any]]) -> StepClipping | None:
        """How the step that is called now is clipped. None: its gradients have been clipped already."""
        params = [param for group in param_groups for param in group["params"]]
        if not self._uses_previous:
            torch.nn.utils.clip_grad_norm_(params, self._max_norm)
            return None
        if self.needs_all:
            norms = [torch.linalg.vector_norm(param.grad) for param in params if param.grad is not None]
        else:
            assert self._previous is not None
            norms = [self._previous.norms[param] for param in params if param in self._previous.norms]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])) if norms else None
        self._previous = StepClipping(self._max_norm, torch.zeros(()) if total is None else total)
        return self._previous


def make_clipping(max_norm: float | None, clip: str) -> Clipping | None:
    """The clipping that a user asks for; InvalidArgument for what is none."""
    if clip not in CLIPS:
        raise InvalidArgument(f"clip is {clip!r}: known are {' and '.join(CLIPS)}")
    return None if max_norm is None else Clipping(max_norm, clip)
