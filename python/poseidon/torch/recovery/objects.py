"""The state from which a training step starts: it is copied, restored, sent to other processes, and received."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.adapter.arrays import Bytes
from poseidon.adapter.random_streams import HostStreams, seed_host_streams, step_seed
from poseidon.adapter.state_text import encode
from poseidon.adapter.training_state import TrainingState
from poseidon.errors import SURVIVABLE, InvalidArgument, Mismatch, PoseidonError
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.elastic import ComparedPosition, ElasticSampler
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.optimizer.partial_step import Hyperparameters, hyperparameters_of
from poseidon.torch.optimizer.undo import TensorCopies, UpdateUndo
from poseidon.torch.recovery.exact_state import extra_states, load_exactly
from poseidon.torch.recovery.lossy_layers import LossyLayers, synchronizers_of
from poseidon.torch.recovery.sharded_state import Layouts
from poseidon.torch.tensors.arrays import TENSORS
from poseidon.torch.tensors.devices import is_accelerator, runtime_of
from poseidon.torch.tensors.shard import part_of

_MODEL_KEYS = {"tensors", "factor sums", "dense history", "choices"}
_SAME_CODE = "start all workers from the same code, and with a new directory if these are old snapshots"


class TrainingObjects(TrainingState):
    """The objects that a training changes, at its present step. Use it from the thread that trains.

    With `recovers` it keeps copies from which the beginnings of the last steps are restored. It keeps none with updates
    on the servers, because all ranks then go back to a version that the servers have saved. With `undo` it also copies
    parameters and optimizer state. Without these an attempt cannot be undone once an optimizer has made its step.
    Raises InvalidArgument for objects without a state, or with a state that cannot be sent.
    """

    arrays = TENSORS

    def __init__(self, objects: Sequence[Any], seed: int | None, recovers: bool, undo: bool) -> None:
        self.models = [one for one in objects if isinstance(one, DistributedDataParallel)]
        self._check_first(objects)
        _check(objects, self.models)
        self._others = [one for one in objects if not isinstance(one, DistributedDataParallel)]
        self._others += [one for model in self.models for one in extra_states(model.module)]
        self.optimizers = [one for one in self._others if isinstance(one, Optimizer)]
        distributed = [one for one in self.optimizers if isinstance(one, DistributedOptimizer)]
        self._on_servers = [one for one in distributed if one.server is not None]
        self._server_updates = [one.server for one in distributed if one.server is not None]
        self.on_servers = bool(self._on_servers)
        self._seed = seed
        self._recovers = recovers
        self._keeps_copies = recovers and not self.on_servers
        self._copies_all = undo
        self._stepped = False  # some optimizer has, in this attempt
        self._layouts = Layouts(self.models)
        encode([self._layouts.plain(one.state_dict()) for one in self._others], self.arrays)
        self._undos: dict[DistributedOptimizer, UpdateUndo] = {}
        self._beginnings: dict[int, _Beginning] = {}
        self._streams_left: StreamStates | None = None  # where a failed attempt has left them
        self._lossy = LossyLayers(self.models)
        self._compare_samplers()
        if recovers and self.on_servers:
            self._lossy.refuse_servers()
        if recovers:
            self._watch_updates(undo)

    def _check_first(self, objects: Sequence[Any]) -> None:
        if not self.models or objects[0] is not self.models[0]:
            raise InvalidArgument(
                "Recovery takes the poseidon.DistributedDataParallel first, or a poseidon.LocalSGD, then optimizers "
                "and the rest"
            )

    def _compare_samplers(self) -> None:
        for one in self._others:
            if isinstance(one, ElasticSampler):
                one.is_recovered = True
                for sync in synchronizers_of(self.models):
                    sync.step_check.add(ComparedPosition(one))

    def _watch_updates(self, undo: bool) -> None:
        for model in self.models if self._keeps_copies and not undo else []:
            model.trained_model().features.add("no_undo")
        for one in self.optimizers if self._keeps_copies else []:
            if isinstance(one, DistributedOptimizer) and (kept := one.keep_undo()) is not None:
                self._undos[one] = kept
            if not undo:
                one.register_step_pre_hook(self._note_step)
        self._check_optimizers()

    def _check_optimizers(self) -> None:
        given = set(_parameters_of(self.optimizers))
        distributed = [one for one in self.optimizers if isinstance(one, DistributedOptimizer)]
        stray = None
        for entry in self._entries():
            updated = entry.updater is not None or entry.on_servers
            if updated and not any(one.updates(entry) for one in distributed):
                raise InvalidArgument(
                    f"Recovery was not given the DistributedOptimizer that updates {entry.name}: give it that, too"
                )
            if stray is None and entry.whole not in given:
                stray = entry.name
        if stray is not None:
            warnings.warn(
                f"Recovery was given no optimizer of parameter {stray}: if there is one, a worker that replaces "
                "another does not get its state",
                stacklevel=5,
            )

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def check_exchange(self) -> None:
        """InvalidArgument if a failure of the exchange that begins now could not be survived."""
        if self._stepped:
            raise InvalidArgument(
                "undo=False, and something is exchanged after an optimizer's step() in the same attempt: a failure "
                "there could not be undone; pass undo=True to Recovery, or move the exchange before step()"
            )

    def describe(self) -> str:
        """What must be the same on all ranks."""
        kinds = [type(one).__name__ for one in (*self.models, *self._others)]
        groups = [f"{len(group['params'])} parameters" for one in self.optimizers for group in one.param_groups]
        samplers = [f"ElasticSampler of {one.describe()}" for one in self._others if isinstance(one, ElasticSampler)]
        return "\n".join([f"objects {', '.join(kinds)}; seed {self._seed}", *groups, *samplers])

    # One step.

    def begin(self, step: int, rank: int) -> None:
        """An attempt at this step begins: notes what it starts from, clears gradients, seeds the random streams."""
        if self._keeps_copies:
            self._lossy.begin(step)
            # Where updates wait for their gradients a step that was complete may have to be made again.
            depth = 2 if self._undos else 1
            self._forget_beginnings(step)
            oldest = self._beginnings.pop(min(self._beginnings)) if len(self._beginnings) >= depth else _Beginning()
            oldest.take(self, step)
            self._beginnings[step] = oldest
            self._stepped = False
        for sync in synchronizers_of(self.models):
            sync.layers.begin_attempt(step)
        self._clear_gradients()
        for update in self._server_updates:
            update.backward_count = 0
        if self._seed is not None:
            seed_streams(self._seed, rank, step)

    def end(self) -> None:
        """The attempt ends: InvalidArgument if the versions of servers, which count pushes, count it otherwise."""
        for update in self._server_updates if self._recovers else []:
            if update.backward_count != 1:
                raise InvalidArgument(
                    f"an attempt made {update.backward_count} synchronizing backward passes with update='server', "
                    "whose checkpoints count them: make one in each attempt, and accumulate under no_sync()"
                )

    def failure_of(self, error: BaseException) -> PoseidonError | None:
        """The error, if another worker or the network is its cause."""
        return error if isinstance(error, SURVIVABLE) else None

    def _forget_beginnings(self, step: int) -> None:
        """Those of this step and later ones."""
        self._beginnings = {number: kept for number, kept in self._beginnings.items() if number < step}

    def _clear_gradients(self) -> None:
        for model in self.models:
            for entry in model.synced_parameters:
                entry.param.grad = None
        for param in _parameters_of(self.optimizers):
            param.grad = None

    def settle(self) -> None:
        """Waits until all updates are made."""
        for sync in synchronizers_of(self.models):
            sync.settle()

    def whole_steps(self, step: int) -> list[int]:
        """Those of this step and the one before whose beginning can be put back."""
        if self._stepped:
            return []
        pending: dict[torch.Tensor, int] = {}
        for sync in synchronizers_of(self.models):
            pending |= sync.flights.pending_updates()
        return [
            candidate
            for candidate in (step, step - 1)
            if candidate in self._beginnings and all(one.reaches(candidate, pending) for one in self._undos.values())
        ]

    def go_back(self, step: int) -> None:
        """Puts back the beginning of this step, one that `whole_steps` named. The client must have ended."""
        for sync in synchronizers_of(self.models):
            sync.abandon()
        self._clear_gradients()
        self._streams_left = self.streams()
        for undo in self._undos.values():
            undo.go_back(step)
        self._forget_beginnings(step + 1)
        self._beginnings[step].put_back(self, step)
        self._lossy.go_back(step)
        for entry in self._entries():
            entry.go_back_to(step)
        self._written()

    def _written(self) -> None:
        for model in self.models:
            model.trained_model().written()

    def connect_models(self) -> None:
        """Collective: the models become part of the job's present membership; servers have no values yet."""
        for model in self.models:
            model.connect()
        for update in self._server_updates:
            update.disconnect()

    def restorable(self) -> list[tuple[str, int, torch.Tensor]]:
        """Names, layers and host tensors of what servers are to take from their checkpoints."""
        return [part for one in self._server_updates for part in one.restorable()]

    def connect_servers(self, restored: bool) -> None:
        """Collective: the optimizers' servers are those of the job's present membership."""
        for one in self._on_servers:
            one.connect(restored)

    def agree(self) -> None:
        """Collective: the models' logs of choices are the same on all ranks."""
        for sync in synchronizers_of(self.models):
            sync.layers.choices.agree()

    def decisions(self) -> list[int]:
        """What the search for each model's priority threshold has found; -1: nothing yet."""
        found = [sync.layers.priorities for sync in synchronizers_of(self.models)]
        return [-1 if one is None else one.decision for one in found]

    def resume(self, step: int, decisions: Sequence[int]) -> None:
        """Exchanges go on with the schemes of this step, and the thresholds that these decisions of searches give."""
        for sync, decision in zip(synchronizers_of(self.models), decisions, strict=True):
            sync.layers.resume(step, decision)
        self._lossy.resume(step)

    def residuals(self) -> Bytes | None:
        """What lossy schemes of this rank have not sent, now that all exchanges are over."""
        return self._lossy.residuals()

    def note_residuals(self) -> None:
        """Notes what they have not sent after the failed attempt."""
        if self._keeps_copies:
            self._lossy.note_failure()

    def take_residuals(self, residuals: Bytes | None) -> None:
        """Makes these the residuals with which `resume` goes on."""
        self._lossy.take(residuals)

    # Parts of the state, for copies.

    def streams(self) -> StreamStates | None:
        """Where the random streams are now; None where every attempt seeds them."""
        devices = {entry.param.device for entry in self._entries() if is_accelerator(entry.param.device)}
        return StreamStates(devices) if self._seed is None else None

    def tensors(self) -> list[torch.Tensor]:
        """Buffers, and parameters that no optimizer has."""
        tensors = [buffer for model in self.models for buffer in model.module.buffers()]
        if self._copies_all:
            updated = set(_parameters_of(self.optimizers))
            params = dict.fromkeys(param for model in self.models for param in model.module.parameters())
            tensors += [param for param in params if param not in updated]
        return tensors

    def copied_optimizers(self) -> list[Optimizer]:
        """Those whose step() makes its updates at once, if these are to be undone."""
        return [one for one in self.optimizers if one not in self._undos] if self._copies_all else []

    def small_objects(self) -> list[Any]:
        """What is neither a model nor an optimizer."""
        return [one for one in self._others if not isinstance(one, Optimizer)]

    def _entries(self) -> Iterable[SyncedParameter]:
        return (entry for model in self.models for entry in model.synced_parameters)

    # To and from other processes.

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        """The state at the beginning of this step, where it is now; its tensors are the objects' own.

        Not `whole`: without what servers hold.
        """
        parts = [] if whole else self._on_servers
        return {
            "models": [_collect_model(model, step, whole) for model in self.models],
            "others": [
                self._layouts.plain(one.worker_state_dict() if any(one is part for part in parts) else one.state_dict())
                for one in self._others
            ],
        }

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        """Takes over the state that another process had at the beginning of this step; its tensors become the objects'.

        Mismatch, before anything is changed, if it is that of other models. `whole` as it was for `collect`.
        """
        if len(state["models"]) != len(self.models) or len(state["others"]) != len(self._others):
            raise Mismatch(f"the state is that of other objects than Recovery was given: {_SAME_CODE}")
        for model, one in zip(self.models, state["models"], strict=True):
            _check_model(model, one, whole)
        for model, one in zip(self.models, state["models"], strict=True):
            _load_model(model, one, step, whole)
        for other, one in zip(self._others, state["others"], strict=True):
            load_exactly(other, self._layouts.whole(one))
            _forget_unscaled(other)
        self._written()
        for undo in self._undos.values():
            undo.confirm()
        self._lossy.go_back(step)
        self._beginnings.clear()
        self._stepped = False
        if self._streams_left is not None:  # the failed attempt is not made again here: another rank has completed it
            self._streams_left.put_back()


class _Beginning:
    """The state from which a step started, except for parameters whose updates are undone one by one."""

    def __init__(self) -> None:
        self._tensors = TensorCopies()
        self._updates: dict[Optimizer, UpdateUndo] = {}
        self._hyperparameters: list[Hyperparameters] = []
        self._small: list[Any] = []
        self._streams: StreamStates | None = None

    def take(self, state: TrainingObjects, step: int) -> None:
        """Copies it all, into memory that an earlier step's copies had."""
        self._tensors.take(state.tensors())
        for optimizer in state.copied_optimizers():
            undo = self._updates.setdefault(optimizer, UpdateUndo(optimizer))
            undo.confirm()
            undo.save(_parameters_of([optimizer]), step)
        self._hyperparameters = [hyperparameters_of(optimizer) for optimizer in state.optimizers]
        self._small = [copy.deepcopy(one.state_dict()) for one in state.small_objects()]
        self._streams = state.streams()

    def put_back(self, state: TrainingObjects, step: int) -> None:
        """Overwrites the objects with what was copied at this step."""
        self._tensors.put_back(state.tensors())
        for undo in self._updates.values():
            undo.go_back(step)
        for optimizer, groups in zip(state.optimizers, self._hyperparameters, strict=True):
            _put_back_hyperparameters(optimizer, groups)
        for one, saved in zip(state.small_objects(), self._small, strict=True):
            one.load_state_dict(copy.deepcopy(saved))
            _forget_unscaled(one)
        if self._streams is not None:
            self._streams.put_back()


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    return [param for one in optimizers for group in one.param_groups for param in group["params"]]


def _put_back_hyperparameters(optimizer: Optimizer, groups: Hyperparameters) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)  # others may hold the tensor itself
            else:
                group[name] = copy.deepcopy(value)


def _forget_unscaled(one: Any) -> None:
    """A GradScaler refuses to unscale twice before its update(), which the failed attempt did not reach."""
    if isinstance(one, torch.amp.GradScaler):
        one._per_optimizer_states.clear()


def _check(objects: Sequence[Any], models: Sequence[DistributedDataParallel]) -> None:
    for one in objects:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            raise InvalidArgument(f"Recovery takes objects with state_dict() and load_state_dict(), not {one!r}")
        if isinstance(one, DistributedOptimizer) and one.model not in models:
            raise InvalidArgument("Recovery needs the model of each DistributedOptimizer that it is given")
    if len({id(one) for one in objects}) < len(objects):
        raise InvalidArgument("Recovery was given the same object twice: give it once")


def _model_tensors(model: DistributedDataParallel, whole: bool) -> list[torch.Tensor]:
    """Parameters and buffers; not `whole`: without those that servers hold."""
    stored = set() if whole else {entry.param for entry in model.synced_parameters if entry.on_servers}
    return [
        *(part_of(param) for param in model.module.parameters() if param not in stored),
        *map(part_of, model.module.buffers()),
    ]


def _collect_model(model: DistributedDataParallel, step: int, whole: bool) -> dict[str, Any]:
    return {
        "tensors": _model_tensors(model, whole),
        "factor sums": [entry.factor_sum_before(step) for entry in model.synced_parameters],
        "dense history": [entry.dense_history for entry in model.synced_parameters],
        "choices": [] if model.synchronizer is None else model.synchronizer.layers.choices.log(),
    }


def _check_model(model: DistributedDataParallel, state: dict[str, Any], whole: bool) -> None:
    if state.keys() != _MODEL_KEYS:
        raise Mismatch(f"the state is that of another version of Poseidon: {_SAME_CODE}")
    here = [(tensor.dtype, tensor.shape) for tensor in _model_tensors(model, whole)]
    there = [(tensor.dtype, tensor.shape) for tensor in state["tensors"]]
    if here != there or len(state["factor sums"]) != len(model.synced_parameters):
        raise Mismatch(f"the state is that of a model with other parameters or buffers: {_SAME_CODE}")


def _load_model(model: DistributedDataParallel, state: dict[str, Any], step: int, whole: bool) -> None:
    with torch.no_grad():
        for tensor, value in zip(_model_tensors(model, whole), state["tensors"], strict=True):
            tensor.copy_(value)
    sums, histories = state["factor sums"], state["dense history"]
    for entry, factor_sum, history in zip(model.synced_parameters, sums, histories, strict=True):
        entry.take_factor_sum(step, factor_sum)
        entry.take_dense_history(history)
    if model.synchronizer is not None:
        model.synchronizer.layers.choices.take_log(state["choices"])


def streams_of(model: nn.Module) -> StreamStates:
    """The present states of the streams from which this model draws."""
    return StreamStates({one.device for one in model.parameters() if is_accelerator(one.device)})


def seed_streams(seed: int, rank: int, step: int) -> None:
    """Seeds all streams so that a step draws the same numbers whenever, and by whatever process, it is done."""
    number = step_seed(seed, rank, step)
    torch.manual_seed(number)
    seed_host_streams(number)


class StreamStates:
    """The present states of this process's streams, to which it can go back. `devices` are the accelerators in use."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._torch = torch.get_rng_state()
        self._devices = {device: runtime_of(device).get_rng_state(device) for device in devices}
        self._host = HostStreams()

    def put_back(self) -> None:
        """The streams go on from there again."""
        torch.set_rng_state(self._torch)
        for device, state in self._devices.items():
            runtime_of(device).set_rng_state(state, device)
        self._host.put_back()
