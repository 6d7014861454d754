"""LocalSGD: a torch optimizer whose workers train alone, and average their parameters from time to time."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.adapter.agreement import broadcast_alike, check_same, first_difference
from poseidon.adapter.features import Features
from poseidon.adapter.layer import WireChoice
from poseidon.adapter.replica_check import replica_check
from poseidon.adapter.stats import latest_synchronization
from poseidon.errors import InvalidArgument, Mismatch, PoseidonError
from poseidon.torch.exchange.weight import Weight
from poseidon.torch.local_sgd.arguments import check_arguments, check_parameters
from poseidon.torch.local_sgd.averaging import PLAIN_MEAN, Averaging, MeanOfParameters, OuterNesterov, OuterUpdate
from poseidon.torch.local_sgd.fragments import Fragments, Streaming
from poseidon.torch.model.collect import collect_parameters, describe
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.model.replica import Replica
from poseidon.torch.model.shards import shards_of
from poseidon.torch.optimizer.wrapper import STATE_HOOKS, OptimizerWrapper, described
from poseidon.torch.process.context import check_joins, context_of
from poseidon.torch.process.process_groups import ranks_of
from poseidon.torch.training.buffers import ModelBuffers
from poseidon.torch.training.other_trainers import note_averages
from poseidon.torch.training.torch_arguments import choose_process_group
from poseidon.torch.training.trained_model import check_module

_KEY = "local_sgd"  # of this class's part of a state_dict
# The LocalSGD that has made the last step of each model.
_LAST_TO_STEP: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LocalSGD]] = weakref.WeakKeyDictionary()


class LocalSGD(OptimizerWrapper):
    """Trains `model` on every worker alone, and averages the workers' parameters after every `every` steps.

        model = MyModel()                                   # not wrapped: gradients stay local
        optimizer = poseidon.LocalSGD(model, torch.optim.AdamW(model.parameters()), every=16)

    It is for links on which no exchange at every step can work: it moves the bytes of one step's exchange once in
    `every` steps. Training is another one than synchronous training: between two averagings the workers' models differ.
    After an averaging they are equal bit by bit. `every=1` averages after every step.

    `step()` calls `optimizer`'s. Every `every`-th call then averages, and blocks until all parameters have arrived. All
    trainable parameters of `model` are averaged, in rank order, also those that `optimizer` does not have. Rank 0's
    buffers reach all ranks then. The state of `optimizer` stays local.

    `outer` makes it DiLoCo (Douillard et al. 2023): servers update the global parameters by an outer optimizer, as
    `outer=poseidon.OuterNesterov(lr=0.7, momentum=0.9)`, from the mean of the ranks' pseudo-gradients, which are the
    last global parameters minus the local ones. `wire` is how the numbers of pseudo-gradients travel, as for
    `DistributedDataParallel`. With a format other than "fp32", or `parameter_wire=bf16`, pseudo-gradients travel also
    without `outer`, and the outer optimizer is plain SGD with lr 1.

    With `fragments=F` the model's parameters are F parts that are averaged at different steps of each period of `every`
    steps, so that the bytes spread. With `overlap_steps` a fragment's exchange runs while so many steps compute.
    Then each of its parameters becomes `mix` (0.5) times itself plus 1 − `mix` times the global one (Streaming DiLoCo,
    Douillard et al. 2025). `average()` makes the replicas equal.

    `device_mesh` is for a model that FSDP2 or tensor parallelism has sharded: the dimension along which it is
    replicated, such as `mesh["replicate"]`. Each rank then averages its shards with the ranks that have the same ones.
    See docs/sharded.md.

    Learning-rate schedulers, hooks and a `GradScaler` take this object as they take `optimizer`. A step that a
    GradScaler skips on one rank counts as a step there. Collective: every rank makes it with the same model and
    arguments, and all take rank 0's parameters and buffers. Raises InvalidArgument, saying what to do, for a model or
    optimizer that is not supported, and Mismatch if the ranks differ. Use it from the thread that trains. See
    docs/local-sgd.md.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int,
        *,
        outer: OuterNesterov | None = None,
        wire: WireChoice | None = None,
        fragments: int = 1,
        overlap_steps: int = 0,
        mix: float | None = None,
        device_mesh: Any = None,
    ) -> None:
        check_arguments(model, optimizer, every, outer)
        self._plan = Streaming.of(every, fragments, overlap_steps, mix)
        group = choose_process_group(None, device_mesh)
        here = context_of(group)
        settings = here.settings
        check_module(model, settings.world_size)
        self.features = Features("local_sgd", within=here.features)
        super().__init__(optimizer)
        self._context = here
        self.model = model
        """The model that it trains."""
        self._shards = shards_of(model, self.features, ranks_of(group))
        self._averaged: nn.Module = model if self._shards is None else self._shards
        self.every = every
        """The number of steps from one averaging to the next."""
        self._buffers = ModelBuffers(model, ())
        self._weight = Weight()
        self._weights_given = 0  # since the last averaging
        self._found = collect_parameters(self._averaged, "ps", wire, settings, ())
        check_parameters(model, optimizer, self._found)
        rounds = settings.parameter_wire != "fp32" or any(entry.asked.wire != "fp32" for entry in self._found)
        self._outer = PLAIN_MEAN if outer is None and rounds else outer
        if self._outer is not None:
            self.features.add("local_sgd_outer")
            if settings.checkpoint_dir:
                self.features.add("saved_averages")
            elif here.servers_save:
                warnings.warn(
                    "what the dedicated servers save of LocalSGD with outer, wire or parameter_wire cannot be taken up "
                    "again: give the next run another job name",
                    stacklevel=2,
                )
        here.features.take(self.features)
        averagings = [self._averaging_of(part) for part in self._plan.cut(self._found)]
        self._fragments = Fragments(averagings, self._plan, self._written)
        self._has_stepped = False
        self.step_count = 0
        """The number of calls of `step()`, skipped steps included."""
        self.steps_alone = 0
        """The number of steps since the last averaging."""
        self.averaging_count = 0
        """The number of averagings so far."""
        self._steps_here = self._waited_ns = 0  # in this membership; the second by averagings
        self._steps_apart = 0  # since all replicas were equal
        check = replica_check(settings, self.features, of_averages=True)
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        self._replica = None if check is None else Replica(self._averaged, ignored, check)
        self._times_equal = 0  # in this membership
        self._model_loads = 0  # since the last averaging
        self._model_is_new = self._loaded_itself = False  # by a load since the last step
        self._step_supports_amp_scaling = True  # so that a GradScaler calls step() also to skip it
        self.share_hooks(*STATE_HOOKS)
        # The program, and not its model, keeps this.
        model.register_load_state_dict_post_hook(_LoadNote(self))
        note_averages(self)
        if not here.recovers:
            self.connect()
            self._check_same_optimizer()
            self.push_parameters()

    def _averaging_of(self, found: list[SyncedParameter]) -> Averaging:
        if self._outer is None:
            return MeanOfParameters(found, self._weight)
        return OuterUpdate(found, self._weight, self._outer, self._context.settings.parameter_wire)

    def connect(self) -> None:
        """Collective: averages in the job's present membership from now on. For `Recovery`.

        The outer optimizer has no values then, until `push_parameters` or `load_state_dict`.
        """
        client, control = self._context.client, self._context.control
        self._weights_given = 0
        self._steps_here = self._waited_ns = self._times_equal = 0
        if client is not None:
            assert control is not None
            check_joins(self._context, "unjoined_call")
            if self._replica is not None:
                self._replica.connect(control)
            self._buffers.check()
            options = f"LocalSGD {self._plan}, outer {self._outer}"
            check_same(control, describe(self._averaged, self._found, options, ()), "model")
            self._buffers.connect(control)
            self._fragments.connect(client, control)
            self._weight.connect(control)

    def _check_same_optimizer(self) -> None:
        if self._context.control is not None:
            names = {param: name for name, param in self.model.named_parameters()}
            groups = [[names[param] for param in group["params"]] for group in self.param_groups]
            check_same(self._context.control, described(self._inner, groups), "optimizer")

    @torch._disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The optimizer's step(). Every `every`-th call averages the parameters then, which is collective."""
        self._check_ready()
        loss = self._local_step(closure)
        self.step_count += 1
        self._steps_here += 1
        self.steps_alone += 1
        self._steps_apart += 1
        with self._waiting():
            self._fragments.step()
        number = self._plan.due(self.steps_alone)
        if number is not None:
            with self._waiting():
                self._check_together(f"fragment {number + 1} of {self._plan.count} on schedule")
                self._fragments.send(number)
        if self.steps_alone >= self.every:
            self._end_period(equal=self._plan.is_plain)
        return loss

    def _check_ready(self) -> None:
        if self._context.recovers and self._context.client is None:
            raise InvalidArgument(
                f"step() before poseidon.Recovery with on_failure={self._context.settings.on_failure}: give the "
                "LocalSGD to Recovery, and train in its attempts"
            )
        holder = "the outer optimizer" if self._outer is not None else "a fragment under way"
        holds = self._outer is not None or self._fragments.is_under_way
        if self._model_is_new and holds and not self._loaded_itself:
            raise PoseidonError(
                f"the model was loaded, and {holder} still has the parameters of before: call push_parameters() of the "
                "LocalSGD on every rank, or load its state_dict(), too"
            )
        self._model_is_new = self._loaded_itself = False
        self._take_turn()

    def _take_turn(self) -> None:
        """Raises InvalidArgument if another one has stepped since this one did, and one of both updates averages."""
        last = _LAST_TO_STEP.get(self.model)
        other = None if last is None else last()
        by_turns = [self, other] if other is not None and other is not self and self._has_stepped else []
        if any(one._outer is not None for one in by_turns):
            Features.refuse("second_local_sgd", "local_sgd_outer")
        self._has_stepped = True
        _LAST_TO_STEP[self.model] = weakref.ref(self)

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        scale, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        if found_inf is None:  # no GradScaler has called this
            return self._inner.step(closure)  # type: ignore[no-any-return]
        self._inner._opt_called = True  # for schedulers that were made with it
        if found_inf.item():
            return None
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(inverse.to(param.grad.device))
        return self._inner.step(closure)  # type: ignore[no-any-return]

    def set_weight(self, weight: int) -> None:
        """Says how many rows this rank trains on from one averaging to the next, until the next call.

        Then averagings take the mean over rows, Σ(w·θ)/Σw, and not over the ranks. Collective: all ranks call it
        between the same two averagings. With Recovery, call it in the attempts in which `steps_alone` is 0. Raises
        InvalidArgument for a negative weight, before Recovery, and for another weight than was given since the last
        averaging.
        """
        self.features.add("set_weight")
        if self._weights_given and weight != self._weight.rows:
            self._weight.refuse(
                f"the weight of this rank is {self._weight.rows} since the last averaging, and would become {weight} "
                "in the middle of the steps to the next one, for which one weight counts: call set_weight once, with "
                "the rows of all steps from one averaging to the next"
            )
        self._weight.set(weight, self._context)
        self._weights_given += 1

    def average(self) -> None:
        """Averages now, at the end of training or of an epoch, and begins to count to `every` again.

        Collective. The ranks may have made different numbers of steps since the last averaging; each counts the same.
        Without a step of any rank since then it does nothing.
        """
        self._check_ready()
        control = self._context.control
        with self._waiting():
            self._check_together("by average()")  # first, because a rank that averages on schedule does so, too
            apart = self._steps_apart if control is None else control.sum([self._steps_apart])[0]
            if apart:
                self._fragments.average()
        if apart:
            self._end_period(equal=True)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts what is done inside as waiting for the other workers."""
        begun_ns = time.monotonic_ns()
        yield
        self._waited_ns += time.monotonic_ns() - begun_ns

    def _check_together(self, why: str) -> None:
        self._check_parameters_now()
        control = self._context.control
        if control is not None:
            check_joins(self._context, "unjoined_averaging")
            number, loads = self.averaging_count + 1, self._model_loads
            text = f"averaging {number} of LocalSGD, {why}, {loads} loads of the model before"
            text += f", {self._weights_given} calls of set_weight" if self._weights_given else ""
            difference = first_difference(control, text)
            if difference is not None:
                rank, theirs, ours = difference
                raise Mismatch(
                    f"the ranks are at different places: rank 0 at {ours!r}, rank {rank} at {theirs!r}; make as many "
                    "steps on every rank, or end an uneven epoch with average() on every rank, and load the model on "
                    "all ranks"
                )

    def _end_period(self, equal: bool) -> None:
        self._send_buffers()
        self.averaging_count += 1
        self.steps_alone = self._model_loads = self._weights_given = 0
        if equal:
            self._steps_apart = 0
            self._times_equal += 1
            if self._replica is not None:
                self._replica.averaged(self._times_equal)
        self._context.tell_notices()
        here, client = self._context, self._context.client
        if here.meter is not None and client is not None:
            layers = latest_synchronization(self._fragments.entries, client)
            here.meter.show(self._steps_here, self._waited_ns, layers, time.monotonic_ns())

    def _written(self) -> None:
        """The parameters have been written to."""
        if self._shards is not None:
            self._shards.written()

    @torch.no_grad()
    def _send_buffers(self) -> None:
        control = self._context.control
        if control is not None:
            self._buffers.broadcast(control, 0, root_waits=True)

    def _check_parameters_now(self) -> None:
        if self._shards is not None:
            self._shards.check()
            return
        known = {entry.param for entry in self._found}
        now = {param: name for name, param in self.model.named_parameters()}
        added = [name for param, name in now.items() if param.requires_grad and param.numel() and param not in known]
        gone = [entry.name for entry in self._found if entry.param not in now]
        if added or gone:
            name = (added or gone)[0]
            raise InvalidArgument(
                f"parameter {name} {'is new or trains now' if added else 'was replaced or removed'}, and LocalSGD "
                "averages those that trained when it was made: make a new LocalSGD on every rank after the "
                "model changes"
            )

    @torch.no_grad()
    def push_parameters(self) -> None:
        """Gives rank 0's parameters and buffers to all ranks, and begins outer momentum and counts anew. Collective.

        It is needed after the model was loaded or edited, unless the state of this object is loaded, too. The state of
        `optimizer` stays.
        """
        if self._context.control is not None:
            check_joins(self._context, "unjoined_call")
            params = {name: param.detach() for name, param in self._averaged.named_parameters()}
            broadcast_alike(self._context.control, params, 0, "list of parameter")
            self._send_buffers()
        self._written()
        self._fragments.take_over()
        self.steps_alone = self._steps_apart = self._model_loads = self._weights_given = 0
        self._model_is_new = False

    def note_model_load(self) -> None:
        """The model's load_state_dict() has been called."""
        self._model_loads += 1
        self._model_is_new = True

    # What a torch optimizer has.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the optimizer's parameters."""
        self._inner.zero_grad(set_to_none)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter: this worker's own."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state_dict(), and under "local_sgd" the counts and the outer optimizer's state.

        Any rank may call it alone. Between two averagings each rank's is its own, as its model's is. The optimizer
        itself can load it, too.
        """
        return self._state_with(self._fragments.state())

    def worker_state_dict(self) -> dict[str, Any]:
        """`state_dict()` without what servers hold: what ranks other than 0 have to load."""
        return self._state_with(self._fragments.state(whole=False))

    def _state_with(self, outer: dict[str, Any] | None) -> dict[str, Any]:
        counts = {"steps": self.step_count, "alone": self.steps_alone, "averagings": self.averaging_count}
        own = {**counts, "every": self.every, "outer": outer}
        if not self._plan.is_plain:
            own["apart"] = self._steps_apart
        return {**self._inner.state_dict(), _KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class returned: each rank its own, or all the same. Collective.

        The outer optimizer's state is rank 0's on all ranks. Load the model's state_dict, too. A checkpoint of the
        optimizer itself begins the counts anew; with `outer`, call `push_parameters()` after it. Raises Mismatch for a
        state of other fragments or another outer optimizer, and for one of another `every` between two averagings.
        """
        own = state_dict.get(_KEY)
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        counts = (0, 0, 0) if own is None else (own["steps"], own["alone"], own["averagings"])
        if self._context.control is not None:
            text = "a state_dict without counts" if own is None else f"counts of steps and averagings {counts}"
            check_same(self._context.control, text, "LocalSGD state")
        if own is not None:
            self._check_period(own)
        self.step_count, self.steps_alone, self.averaging_count = counts
        self._steps_apart = self.steps_alone
        if own is None:
            self._fragments.drop_pending()
        else:
            self._steps_apart = own.get("apart", self.steps_alone)
            self._fragments.load(own["outer"])
            self._loaded_itself, self._model_is_new, self._model_loads = True, False, 0

    def _check_period(self, own: dict[str, Any]) -> None:
        """Mismatch if the state is from within a period of another length: what is due in it could be left out."""
        alone, saved = own["alone"], own.get("every", self.every)
        if own.get("apart", alone) and (saved != self.every or alone >= self.every):
            length = f"every={saved}" if saved != self.every else "a larger every"  # the key was not always there
            raise Mismatch(
                f"the checkpoint is of a LocalSGD with {length}, {alone} steps into a period, and this one has "
                f"every={self.every}: pass the same every as when it was saved, or call average() on every rank "
                "before saving"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model that trained when this object was made, or raises InvalidArgument."""
        if isinstance(self._inner, Optimizer):
            self._inner.add_param_group(param_group)
            try:
                check_parameters(self.model, self._inner, self._found)
            except InvalidArgument:
                del self._inner.param_groups[-1]
                raise
        else:
            super().add_param_group(param_group)  # from Optimizer.__init__

    def __repr__(self) -> str:
        return f"LocalSGD({self._plan}, outer {self._outer}, {self._inner!r})"


class _LoadNote:
    """A hook of the model's load_state_dict() that tells the optimizer, which it does not keep.

    A copy of the model, such as one for evaluation or in a file, tells nobody.
    """

    def __init__(self, optimizer: LocalSGD | None = None) -> None:
        self._told: Callable[[], LocalSGD | None] = _nobody if optimizer is None else weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._told()
        if optimizer is not None:
            optimizer.note_model_load()

    def __deepcopy__(self, _: Any) -> _LoadNote:
        return _LoadNote()

    def __reduce__(self) -> tuple[type[_LoadNote], tuple[()]]:
        return _LoadNote, ()


def _nobody() -> None:
    """There is no optimizer."""
