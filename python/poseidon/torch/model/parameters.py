"""The parameters of a module that are synchronized, and the state of each one's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.schemes import converts, takes_factors, workers_multiply
from poseidon.torch.model.collector import collector_paused
from poseidon.torch.model.compiled import close_gate, is_in_use, open_gate
from poseidon.torch.model.factors import NO_FACTORS, Factors, hand_over_factors, keep_factors
from poseidon.torch.model.gradient_form import TouchedRowsForm, form_of
from poseidon.torch.model.hooks import NO_ARRIVALS, accumulating_nodes, has_others, posthook, prehook
from poseidon.torch.model.passes import Mode
from poseidon.torch.model.stored_parameter import StoredParameter
from poseidon.torch.tensors.ownership import is_allocated, is_shared
from poseidon.torch.tensors.pending_gradient import GradientGone, PendingGradient
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import Watcher, raw_grad, unwatch, watch

_DENSE_EXCHANGES = 16


class BackwardListener(Protocol):
    """The object that is told of the backward passes that reach a parameter."""

    @property
    def mode(self) -> Mode:
        """What the backward pass that runs now does with gradients."""

    def before_factors(self) -> None:
        """A use of the layer is about to hand over factors."""

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        """All uses of the parameter have contributed; `.grad` does not yet hold the dense ones, if any.

        Only those that `hear_before` tell it.
        """

    def after_accumulation(self, entry: SyncedParameter) -> None:
        """`.grad` holds the dense contributions, `entry.factors` the others."""


class SyncedParameter(SyncedLayer):
    """One parameter, its layer in the client, and the part of its gradient that waits to be exchanged.

    Its methods run in the thread that runs backward, with the GIL. Only they write its attributes.
    """

    def __init__(
        self,
        param: nn.Parameter,
        facts: LayerFacts,
        wishes: LayerWishes,
        rules: LayerRules,
        owners: Sequence[nn.Module] = (),
        linears: Sequence[nn.Linear] = (),
    ) -> None:
        """Raises InvalidArgument, naming the parameter, if it cannot do what is wished."""
        connected = all(isinstance(part, nn.Linear) for part in owners)
        super().__init__(facts, wishes, rules, tuple(param.shape), connected)
        self.param = param
        self.whole: Any = param.whole if isinstance(param, Shard) else param  # as its module and optimizers have it
        self.owners = owners  # the modules that have it as a parameter of their own
        self.form = form_of(param, facts.gives_rows == "sparse", self.row_gradient)  # of what is exchanged
        self.layout = self.form.layout
        self.shared = False  # with another wrapped model
        self.used_elsewhere = False  # the weight is also used outside its Linear modules
        self.intercepted = False  # as `FactorTaker` says
        self.factors = NO_FACTORS  # what of the gradient waits to be sent as such
        self.arrived: torch.Tensor | None = None  # what autograd is just putting into, or adding to, `.grad`
        self.stored: StoredParameter | None = None  # where servers hold and update the parameter
        self.rereads: Rereads | None = None  # what is told of such updates
        self.arrivals = NO_ARRIVALS  # of its group
        self._allocated_at = param.data_ptr() if is_allocated(param) else None
        self._linears = linears  # the modules that may hand over factors; empty where the gradient is always dense
        self._captures = False  # they do so now
        self._all_linears = linears  # those of them where servers do not hold the parameter
        self._factor_count = 0  # K of this rank since the last synchronization
        self._refused_factors = False  # some of these rows went into the dense gradient
        self._dense_exchanges = 0  # to come, since gradients are added to what an exchange has left in `.grad`
        self._placeholder: PendingGradient | None = None
        self._listener: Callable[[], BackwardListener | None] = _nobody
        self._node: Any = None
        self._hook: Any = None
        self._prehook: Any = None

    def lies_in_own_memory(self) -> bool:
        """Whether PyTorch has allocated the parameter's memory, for this process alone.

        It is not known of what NumPy was given before the model was wrapped, and of what `torch.load` has made.
        """
        if is_allocated(self.param):
            return True
        return self.param.data_ptr() == self._allocated_at and not is_shared(self.param)

    def new_buffer(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Uninitialized memory for what is exchanged, in the layout that all ranks agreed on.

        On the parameter's device, unless another is given.
        """
        layout, device = self.layout, device or self.param.device
        return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=device)

    def attach(self, listener: BackwardListener, node: Any) -> None:
        """`listener` hears of every backward that reaches this parameter. `node` accumulates its gradients.

        It hears of it once the gradient is in `.grad`. To hear of it before, too, takes `hear_before`.
        """
        self._listener = weakref.ref(listener)  # which owns this entry
        self._node, self._hook = node, node.register_hook(self.make_posthook())
        if self.shared or self.stored is not None or self.updater is not None:
            self.hear_before()

    def is_heard(self) -> bool:
        """Whether a backward pass tells its listener of the gradient, if it ever has one.

        A tensor whose dtype or device changes, even for a moment, gets another node, and none of the hooks.
        """
        if self._node is None or not self.leaf.requires_grad:  # which may be frozen for a while
            return True
        return accumulating_nodes([self.leaf])[0] is self._node

    @property
    def leaf(self) -> torch.Tensor:
        """The tensor whose gradient autograd accumulates."""
        return self.param

    def make_posthook(self) -> Callable[..., None]:
        """What autograd is to call when it has accumulated the gradient."""
        return posthook(self)

    def make_prehook(self) -> Callable[..., None]:
        """What autograd is to call when it is about to accumulate the gradient."""
        return prehook(self)

    @property
    def hears_before(self) -> bool:
        """Whether its listener hears of gradients before they are accumulated."""
        return self._prehook is not None

    def hear_before(self) -> None:
        """From now on the listener also hears of every backward that is about to add to `.grad`, until `detach`.

        That takes time. It is needed where something may be under way then: an exchange from the memory of `.grad`, an
        update, or factors that `.grad` stands for.
        """
        if self._hook is not None and self._prehook is None:
            self._prehook = self._node.register_prehook(self.make_prehook())

    def detach(self) -> None:
        """Takes the hooks away again."""
        for hook in (self._hook, self._prehook):
            if hook is not None:
                hook.remove()
        self.capture(False)
        self._listener, self._hook, self._prehook = _nobody, None, None

    def capture(self, wanted: bool) -> None:
        """Whether the modules that have the parameter are to hand over factors from now on."""
        self._captures = wanted and not self.shared and bool(self._linears)
        for linear in self._linears:
            if self._captures:
                self.hear_before()
                hand_over_factors(linear, self)
            else:
                keep_factors(linear, self)
        if not self._captures:
            close_gate(self)
        elif is_in_use():
            open_gate(self)

    def capture_compiled(self) -> None:
        """Has code that torch.compile makes of the modules hand over factors if they do so."""
        if self._captures:
            open_gate(self)

    def forget_client(self) -> None:
        super().forget_client()
        self._placeholder = None
        self.start_over()

    def share(self) -> None:
        """Another wrapped model has the parameter, too, so that `.grad` may be in two exchanges at once."""
        if self.on_servers or self.updater is not None:
            raise InvalidArgument(
                f"parameter {self.name} is in another wrapped model already, whose DistributedOptimizer updates it: "
                "wrap both models in one module, or use the optimizers themselves; delete the earlier wrapper and its "
                "optimizer if they are not used any more"
            )
        self.capture(False)
        self.shared = True
        self.hear_before()

    def check_free(self) -> None:
        """InvalidArgument if no DistributedOptimizer can have the parameter."""
        if self.shared:
            raise InvalidArgument(
                f"parameter {self.name} is in two wrapped models, so that no DistributedOptimizer can update it: wrap "
                "both models in one module, or use the optimizer itself"
            )

    def hold_on_servers(self, parameter_wire: str) -> None:
        if isinstance(self.param.grad, PendingGradient):
            with suppress(GradientGone):  # of an optimizer that the program has dropped; whoever reads it is told
                self.param.grad.resolve()
        self.resume()
        self.capture(False)
        super().hold_on_servers(parameter_wire)
        self.stored, self._all_linears, self._linears = StoredParameter(self.param), self._linears, ()
        self.hear_before()

    def leave_servers(self) -> None:
        self.stored, self.rereads, self._linears = None, None, self._all_linears
        super().leave_servers()
        self.capture(self.terms.uses_factors)

    def update_by(self, updater: object | None) -> None:
        super().update_by(updater)
        if updater is not None:
            self.hear_before()

    def before_accumulation(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Autograd is about to add the gradient to `.grad`."""
        self.resume()
        if (listener := self._listener()) is not None:
            listener.before_accumulation(self, dense=gradients[0] is not None)

    def after_accumulation(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Autograd has added it."""
        if (listener := self._listener()) is None:
            return
        self.arrived = gradients[0] if gradients else None
        try:
            listener.after_accumulation(self)
        finally:
            self.arrived = None

    @property
    def armed(self) -> bool:
        """Whether the forward pass that runs now is one through the wrapper, or is made again in its backward."""
        listener = self._listener()
        return listener is not None and listener.mode is not Mode.OTHERS

    def _must_be_dense(self, left: torch.Tensor) -> bool:
        param: Any = self.leaf
        # A hook must be shown the gradient itself.
        if param._backward_hooks or param._post_accumulate_grad_hooks or self._node_is_hooked():
            return True
        rows, cols = self.param.shape
        if (self.factors.count + left.shape[0]) * (rows + cols) > rows * cols:
            return True
        if self.factors and self.factors.lefts[0].dtype != left.dtype:
            return True
        return not self.may_send(left.dtype)

    def _node_is_hooked(self) -> bool:
        """Whether others have hooks at the node that accumulates the gradient."""
        return any(handle is not None and has_others(handle) for handle in (self._prehook, self._hook))

    def may_send(self, dtype: torch.dtype) -> bool:
        """Whether the next exchange takes factors of this dtype. Before the ranks have agreed on a scheme it may."""
        if self.next_scheme == "" or workers_multiply(self.next_scheme):
            return dtype.itemsize <= self.param.dtype.itemsize
        if converts(self.next_scheme) and self.param.dtype == torch.float32:
            return takes_factors(self.next_scheme) and dtype.itemsize <= self.param.dtype.itemsize
        return takes_factors(self.next_scheme) and dtype == self.param.dtype

    @torch._disable_dynamo
    def take_factors(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Called in backward with the rows of one use of the layer (K×M and K×N).

        True: taken, or not wanted by anybody. False: the caller has to return the dense gradient.
        """
        listener = self._listener()
        # With create_graph the gradient must have a history.
        if listener is None or listener.mode is Mode.OTHERS or torch.is_grad_enabled():
            return False
        try:
            if not torch._C._will_engine_execute_node(self._node):
                return True
        except RuntimeError:  # torch.autograd.grad asks for this very gradient
            return False
        self.resume()
        listener.before_factors()
        self._factor_count += left.shape[0]
        if self._must_be_dense(left):
            self._refused_factors = True
            return False
        # Both are the program's: a batch that it fills again, a buffer given to backward(), rows that a hook or a
        # reversible network rewrites, memory that autograd makes the gradient of another parameter.
        self.factors = self.factors or Factors()
        self.factors.append(_own_copy(left), _own_copy(right))
        return True

    def known_factor_count(self, grad: torch.Tensor) -> int | None:
        """K of the dense gradient that is about to be sent, or its rows that are not zeros, if its scheme asks for it.

        None where the gradient is no sum of factors.
        """
        if isinstance(self.form, TouchedRowsForm):
            return int(self.form.row_mask(grad).sum()) if self.counted else None
        hooked = bool(getattr(self.leaf, "_backward_hooks", None)) or self._node_is_hooked()
        if not self.factorable or self.used_elsewhere or self.shared or hooked or self._dense_exchanges:
            return None
        return self._factor_count

    def note_added(self) -> None:
        """Its factors are added to a gradient that an exchange has left, which no factors stand for.

        For some exchanges then the layer is taken for a dense one: every second would be, and go by the wrong scheme.
        """
        self._dense_exchanges = _DENSE_EXCHANGES

    def begin_dense_exchange(self) -> None:
        """A dense gradient of the layer is about to be sent."""
        if self._dense_exchanges:
            self._dense_exchanges -= 1

    def note_dense_contribution(self) -> None:
        """A dense gradient arrived while the layer sends factors."""
        if not self._refused_factors:
            self.used_elsewhere = True

    @property
    def dense_history(self) -> list[int]:
        """Why the layer may be taken for a dense one, for another rank's `take_dense_history`."""
        return [int(self.used_elsewhere), self._dense_exchanges]

    def take_dense_history(self, history: Sequence[int]) -> None:
        """Takes over another rank's `dense_history`."""
        self.used_elsewhere, self._dense_exchanges = bool(history[0]), history[1]

    def start_over(self) -> None:
        """This synchronization has what there was."""
        self.factors, self._factor_count, self._refused_factors = NO_FACTORS, 0, False

    def accumulated(self, mode: Mode) -> None:
        """A backward that exchanges nothing has added to the gradient."""
        if mode is Mode.LOCAL:
            self._hold()
            return
        grad: Any = self.param.grad
        # What is added to the mean, such as the gradient of a penalty, is the program's to answer for.
        if self.updater is not None and grad is not None and not hasattr(grad, "_poseidon_exchanged"):
            grad._poseidon_alone = grad._version

    def note_exchanged(self, grad: Any) -> None:
        """This tensor, which is in `.grad`, is the mean over the ranks."""
        grad._poseidon_exchanged = True

    def trained_alone(self) -> bool:
        """Whether `.grad` is what a backward left that was none of the wrapper's: this rank's own."""
        grad: Any = raw_grad(self.param)
        version = getattr(grad, "_poseidon_alone", None)
        return version is not None and version == grad._version

    def _hold(self) -> None:
        """Makes `.grad` show what the held factors stand for."""
        if not self.factors:
            return
        if self.param.grad is None:
            self._placeholder = self.param.grad = self.factors.pending_gradient(self.param)
        else:
            with torch.no_grad():
                self.factors.add_to(self.param.grad)
            self.factors = NO_FACTORS

    def has_gradient(self) -> bool:
        """Whether something other than zeros waits in `.grad`, or to be sent as factors."""
        self.resume()
        grad = raw_grad(self.param)
        if grad is None or self.factors:
            return bool(self.factors)
        return bool((grad._values() if grad.is_sparse else grad).any())

    def resume(self) -> None:
        """Takes held factors back out of `.grad`, or drops them if the user cleared or replaced `.grad`."""
        if self._placeholder is None:
            return
        if self.param.grad is self._placeholder:
            self.param.grad = None
            self.factors = self.factors.copy()
        else:
            self.factors = NO_FACTORS
        self._placeholder = None


class Rereads(Watcher):
    """Parameters that are read in the backward pass in which the servers update them.

    Recomputation (`torch.utils.checkpoint`) repeats a part of the forward pass, and must see the values of then. As a
    rule it reads parameters that get their gradients later. But a block may read the weight of a later layer without a
    gradient for it (`weight.detach()`), whose update has then come.

    It is the watcher of one optimizer's parameters from the start of each one's update to the end of the backward pass.

    `apart`: updates are received beside the parameters, and copied when backward is over. So it is in the first
    backward pass, and in all others if some parameter was read there. In a model that does not do so the parameters'
    own memory receives, without a copy.
    """

    def __init__(self) -> None:
        self.apart = True
        self._seen = False
        self._watched: list[SyncedParameter] = []

    def watch(self, entry: SyncedParameter) -> None:
        """The update of this parameter has begun."""
        self._watched.append(entry)
        watch(entry.whole, self, entry)

    def end(self) -> None:
        """The backward pass is over, and all updates are in place."""
        for entry in self._watched:
            unwatch(entry.whole)
        self._watched.clear()
        self.apart = self._seen

    # As a `Watcher`.

    def used(self, entries: Sequence[SyncedParameter]) -> None:
        """Their values are needed now."""
        for entry in entries:
            unwatch(entry.whole)
        if torch._C._current_graph_task_id() == -1:  # after a backward that has failed
            return
        self._seen = True
        if not self.apart:
            raise PoseidonError(
                f"parameter {entries[0].name} was read in a backward pass, by a recomputation or a hook, after the "
                "servers had updated it, and the first backward pass did not do so: read it with its gradient, or pass "
                "update='worker' to DistributedOptimizer"
            )

    def taken(self, entry: SyncedParameter) -> None:
        """Someone has taken the parameter out of its module."""
        self._seen = self._seen or torch._C._current_graph_task_id() != -1


@collector_paused()
def attach_all(entries: Sequence[SyncedParameter], listener: BackwardListener) -> None:
    """Attaches all of them. What autograd knows of them is looked up at once, which takes a part of the time.

    InvalidArgument if one of them requires no gradient.
    """
    frozen = next((entry.name for entry in entries if not entry.leaf.requires_grad), None)
    if frozen is not None:
        raise InvalidArgument(
            f"parameter {frozen} required a gradient when the module was wrapped, and does not now: let it require one "
            "again, or wrap the module again, on all ranks"
        )
    for entry, node in zip(entries, accumulating_nodes([entry.leaf for entry in entries]), strict=True):
        entry.attach(listener, node)


def _nobody() -> None:
    return None


def _own_copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().clone(memory_format=torch.contiguous_format)
