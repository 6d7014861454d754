"""DistributedOptimizer: a torch optimizer whose updates happen as part of the exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.adapter.agreement import check_same
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.arguments import check_arguments, features_of
from poseidon.torch.optimizer.hyperparameters import ComparedHyperparameters
from poseidon.torch.optimizer.known import updates_by_element, updates_per_parameter
from poseidon.torch.optimizer.rules import algorithm_of, check_aggregator, check_options, entries_of
from poseidon.torch.optimizer.server_update import ServerUpdate
from poseidon.torch.optimizer.succession import Tenure, enter, succeed
from poseidon.torch.optimizer.undo import UpdateUndo
from poseidon.torch.optimizer.worker_update import Clipping, WholeStep, WorkerUpdate, make_clipping
from poseidon.torch.optimizer.wrapper import STATE_HOOKS, STEP_HOOKS, OptimizerWrapper, described, loss_of
from poseidon.torch.process.context import check_joins
from poseidon.torch.tensors.memory import flat_view, held_bytes


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of optimizer state (momentum, moments)."""

    this_process: int  # in this worker and the shard that it hosts
    worker_side: int  # what the optimizer would hold in every worker


def _scaling(name: str, on_servers: Any) -> Any:
    """What GradScaler.step() sets on an optimizer that scales by itself."""

    def get(self: DistributedOptimizer) -> Any:
        return on_servers if self._on_servers else getattr(self._inner, name)

    def put(self: DistributedOptimizer, value: Any) -> None:
        if self._on_servers:
            Features.refuse("grad_scaler", "update_server")
        setattr(self._inner, name, value)

    def drop(self: DistributedOptimizer) -> None:
        delattr(self._inner, name)

    return property(get, put, drop)


class DistributedOptimizer(OptimizerWrapper):
    """Trains the parameters of `optimizer`, whose gradients `model` synchronizes, with less waiting.

    `update="worker"` (the default): neither the end of backward nor `step()` waits. Each parameter is updated when its
    gradient has arrived. The next use of a parameter, as a rule the next forward pass, waits for that parameter alone.
    Gradients that are needed first are exchanged first. This is for optimizers that are known to update each parameter
    on its own, and those of which `per_parameter=True` says so. Any other makes its whole `step()` when all gradients
    are there, for which backward waits. The bits are those of `optimizer` itself. `max_norm` clips the gradients by
    their total 2-norm: `clip="gathered"` waits for all of them, and "previous" takes the norm of the step before. See
    docs/distributed-optimizer.md.

    `update="server"`: the servers hold the parameters and the optimizer's state, and update them. This is for
    torch.optim.SGD, Adam and AdamW. See docs/server-update.md. `resume` goes on from what the servers have saved in
    `checkpoint_dir`, if there is something. `resumed_version` is then the step after which it was saved, otherwise 0.
    See docs/checkpoints.md. `aggregator` names what makes one gradient of those of all ranks: "sum" their mean,
    "median" the median of every element, or what a C++ program has registered in the servers' processes.

    Use this object instead of `optimizer`. `param_groups`, hooks and learning-rate schedulers work as before. With one
    worker the optimizer itself runs. Collective: every rank wraps the same optimizer. Raises InvalidArgument, saying
    what to use instead, for an optimizer that is not supported. Raises Mismatch if the ranks' optimizers differ.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: DistributedDataParallel,
        update: str | None = None,
        *,
        max_norm: float | None = None,
        clip: str = "gathered",
        resume: bool = False,
        aggregator: str = "sum",
        per_parameter: bool = False,
    ) -> None:
        check_arguments(optimizer, model, update, aggregator)
        trained = model.trained_model()
        features = features_of(optimizer, trained, update or "worker", max_norm, clip, resume, aggregator)
        self.resumed_version = 0
        self.server: ServerUpdate | None = None
        """Its updates on the servers; None with updates on the workers, and with one worker."""
        self._worker: WorkerUpdate | None = None
        self._whole: WholeStep | None = None  # instead of `_worker`, for optimizers that need all gradients
        super().__init__(optimizer)
        self.model = model
        """The model whose gradients it waits for."""
        self._on_servers = update == "server"
        self.step_count = 0
        """The number of calls of `step()`."""
        self._compared = ComparedHyperparameters(optimizer, counts=not self._membership.recovers)
        self._tenure = Tenure(self, features, self._compared)
        if self._on_servers and model.synchronizer is not None:
            self._update_on_servers(model.synchronizer, resume, aggregator)
        else:
            self._update_on_workers(model.synchronizer, make_clipping(max_norm, clip), per_parameter)
        self.share_hooks(*STEP_HOOKS, *STATE_HOOKS)
        # On servers GradScaler would otherwise change gradients that have been used already; so it says what it wants.
        # An optimizer that divides by the scale itself does so after clipping, which would take scaled norms.
        if self._on_servers or (max_norm is None and getattr(optimizer, "_step_supports_amp_scaling", False)):
            self._step_supports_amp_scaling = True

    @property
    def _membership(self) -> Membership:
        """That of the job that trains the model: of all ranks, or of its process group."""
        return self.model.trained_model().context

    def _update_on_servers(self, sync: Synchronizer, resume: bool, aggregator: str) -> None:
        here = self._membership
        algorithm = algorithm_of(self._inner)
        groups = entries_of(self._inner, self.model.module, self.model.synced_parameters)
        entries = [entry for group in groups for entry in group]
        check_aggregator(aggregator, entries)
        self._check_same(f"{aggregator}\n{self._saving(resume)}", groups)
        succeed(self.model.trained_model(), entries, on_servers=True)
        new = [entry for entry in entries if not entry.on_servers]
        if new and here.saved is not None:
            here.saved.check_new()
        sync.layers.store(new)
        if here.saved is not None:
            here.saved.add({entry.layer: flat_view(entry.new_buffer("cpu")) for entry in new})
            sync.saved = here.saved
        same_step = here.features.keeps(SAME_STEP)
        # With Recovery a failure is to be seen in the attempt whose step it spoils.
        flights = sync.flights if same_step and not here.recovers else None
        self.server = ServerUpdate(algorithm, groups, self._inner, same_step, self._tenure, aggregator, flights)
        sync.updates.append(self.server)
        if flights is not None:
            sync.layers.prioritize()
        enter(self.model.trained_model(), self.server)
        if here.recovers:
            return  # the servers get their values when `Recovery` has found the others
        self.server.connect(here.present_client, here.present_control, has_values=not new)
        if resume:
            self.resumed_version = self.server.resume(self.state)
            self.state.clear()
        else:
            self._hand_over_state()
        if (new or resume) and here.saved is not None:
            here.saved.resumed(self.resumed_version)

    def _saving(self, resume: bool) -> str:
        """What the ranks must have alike for versions to be whole. They may call the directory by different names."""
        settings = self._membership.settings
        if not settings.checkpoint_dir:
            return f"no checkpoint_dir, resume={resume}"
        return f"checkpoint_dir, checkpoint_every={settings.checkpoint_every}, resume={resume}"

    def _update_on_workers(self, sync: Synchronizer | None, clipping: Clipping | None, said: bool) -> None:
        apart = updates_per_parameter(self._inner, said)
        if self.model.trained_model().features.has("sharded"):
            apart = apart and updates_by_element(self._inner)
        if self._on_servers:  # which do not exist; what they could not do is refused all the same
            algorithm_of(self._inner)
            groups = entries_of(self._inner, self.model.module, self.model.synced_parameters)
        else:
            groups = [self._entries_in(group["params"]) for group in self.param_groups]
        entries = [entry for group in groups for entry in group]
        if not entries:
            raise InvalidArgument("the model synchronizes no parameter of the optimizer: pass the model that it trains")
        self._check_same(str(apart), groups)
        succeed(self.model.trained_model(), entries, on_servers=False)
        if apart:
            self._worker = WorkerUpdate(self._inner, sync, clipping, self._tenure)
            if sync is not None:
                sync.layers.prioritize()
        else:
            self._whole = WholeStep(self._inner, clipping, self._tenure)
        update = self._worker or self._whole
        assert update is not None
        enter(self.model.trained_model(), update)
        update.take(entries)
        if apart:
            self._tenure.features.add("per_parameter")

    def _check_same(self, how: str, groups: list[list[SyncedParameter]]) -> None:
        """Collective: all ranks have the same optimizer, for these parameters, and use it so."""
        control = self._membership.control
        if control is not None and not self._membership.recovers:
            check_joins(self._membership, "unjoined_call")
            names = [[entry.name for entry in entries] for entries in groups]
            check_same(control, f"{how}\n{described(self._inner, names)}", "optimizer")

    def keep_undo(self) -> UpdateUndo | None:
        """Makes each update keep what it overwrites, for `Recovery`. None if no update waits for its gradient."""
        if self._worker is None or self.model.synchronizer is None:
            return None
        self._worker.undo = UpdateUndo(self._inner)
        return self._worker.undo

    def updates(self, entry: SyncedParameter) -> bool:
        """Whether this optimizer updates the parameter, here or on the servers."""
        if self.server is not None:
            return entry in self.server.entries
        return entry.updater is not None and entry.updater is self._worker

    def _entries_in(self, params: Sequence[torch.Tensor]) -> list[SyncedParameter]:
        synced: dict[torch.Tensor, SyncedParameter] = {entry.whole: entry for entry in self.model.synced_parameters}
        entries = [synced[param] for param in params if param in synced]
        for entry in entries:
            entry.check_free()
        return entries

    @property
    def per_parameter(self) -> bool:
        """Whether each parameter is updated when its own gradient has arrived, and `step()` does not wait."""
        return self._worker is not None

    @torch._disable_dynamo
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The optimizer's step(). If it is `per_parameter`, it does not wait.

        `closure`, if given, runs the backward. It is called once, or as the optimizer does if it is not
        `per_parameter`. With updates on the servers step() raises PoseidonError if the optimizer itself would now do
        something else than the servers did.
        """
        self._inner._opt_called = True  # for schedulers that were made with it
        self._tenure.check()
        if self._whole is not None:
            loss: float | None = self._whole.step(closure)
        else:
            loss = loss_of(closure)
            update = self.server or self._worker
            assert update is not None
            with torch.no_grad():
                update.step()
        self.step_count += 1
        self._compared.stepped()
        return loss

    def missed_steps(self) -> Iterator[int]:
        """With stragglers=drop, yields once for each step that was completed without this worker. Not collective.

            for _ in optimizer.missed_steps():
                optimizer.step()                    # and what else follows backward in the loop

        For each step, the gradients are those of the workers that made it, as after a backward pass of this worker.
        They replace what was in `.grad`. The iteration ends when this worker is no longer behind. Iterate after
        `step()`, and count the loop's steps by `step_count`. Raises InvalidArgument if the optimizer has only a part
        of the model.
        """
        sync = self.model.synchronizer
        if sync is None or self._membership.settings.stragglers != "drop":
            return
        self._check_has_all(sync)
        while sync.steps_behind() > 0:
            before = self.step_count
            self.zero_grad()
            sync.exchange_nothing(missed=True)
            yield before
            if self.step_count == before and self._has_gradients_to_use():
                raise PoseidonError("a missed step was not made: call step() for every item of missed_steps()")

    def _has_gradients_to_use(self) -> bool:
        """Whether there are gradients that are not cleared and with which a GradScaler does not skip the step."""
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]
        return any(bool(grad.any()) for grad in grads) and all(bool(grad.isfinite().all()) for grad in grads)

    def _check_has_all(self, sync: Synchronizer) -> None:
        own = {param for group in self.param_groups for param in group["params"]}
        other = next((entry.name for entry in sync.entries if entry.whole not in own), None)
        if other is not None:
            raise InvalidArgument(
                f"missed_steps() would leave parameter {other} behind, which another optimizer updates: use one "
                "optimizer for all parameters of the model, or do without missed_steps()"
            )

    def synchronize(self) -> None:
        """Waits until all gradients are in place and, after `step()`, all updates.

        It is needed only before code reaches parameters or gradients past PyTorch: through pointers or views that were
        made before, or in compiled code.
        """
        update = self._worker or self.server
        if update is not None:
            update.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, without waiting for those in flight."""
        if self._whole is not None:
            self._inner.zero_grad(set_to_none)
            return
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state by parameter, with all updates in it.

        Empty where servers hold it. Clearing or editing it has no effect then: use `load_state_dict()`.
        """
        self.synchronize()
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    def state_dict(self) -> dict[str, Any]:
        """What the torch optimizer's own state_dict() would be. Any rank may call it alone."""
        if self._whole is not None:
            return self._inner.state_dict()  # type: ignore[no-any-return]
        if self.server is not None:
            self._tenure.check()
        if self.server is None or not self.server.connected:
            saved = super().state_dict()
            # Its order is that in which gradients first arrived, another one on every rank.
            saved["state"] = dict(sorted(saved["state"].items(), key=lambda item: (isinstance(item[0], str), item[0])))
            return saved
        self.state.update(self.server.pull_states())
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of the torch optimizer.

        With updates on the servers it is collective, and every rank passes the same. It also gives rank 0's parameters
        to everybody, so load the model first.
        """
        if self._on_servers:
            check_options(state_dict["param_groups"])
        self._tenure.check()
        self._compared.loaded()
        if self._whole is not None:
            self._inner.load_state_dict(state_dict)
        else:
            super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The last thing that Optimizer.load_state_dict does; each optimizer has its own way with old checkpoints.
        self.synchronize()
        self._inner.__setstate__(state)
        if self.server is not None:
            self._hand_over_state()

    def _hand_over_state(self) -> None:
        assert self.server is not None
        if self.server.connected:  # otherwise `connect` does so
            self.server.load_states(self.state, keep_digits=True)
            self.state.clear()

    def connect(self, restored: bool) -> None:
        """Connects to the servers of the job's present membership. Collective, for `Recovery`.

        `restored` says that they have the values of a checkpoint. Otherwise they get rank 0's parameters and state.
        """
        here = self._membership
        assert self.server is not None
        self.server.connect(here.present_client, here.present_control)
        if restored:
            self.server.take_restored()
        else:
            self._hand_over_state()

    def worker_state_dict(self) -> dict[str, Any]:
        """`state_dict()` without what the servers hold."""
        return super().state_dict()

    def push_parameters(self) -> None:
        """With updates on the servers, gives rank 0's parameters to the servers and to every rank. The state stays.

        Collective. It is needed after parameters were changed on the workers (`model.load_state_dict`, an edit).
        """
        self._tenure.check()
        if self.server is not None:
            self.server.push_parameters()

    def pull_parameters(self) -> None:
        """With updates on the servers, gives the servers' parameters to every rank. Collective; call it after `step()`.

        With consistency=ssp and async the ranks' parameters differ by the updates that each has not seen yet. So call
        this when the ranks must agree, at the end of training or of an epoch. With parameter_wire=bf16 it brings the
        servers' float32 values, for a checkpoint. The next step rounds them again. Otherwise it changes nothing.
        """
        self._tenure.check()
        if self.server is not None:
            self.server.pull_parameters()

    def memory(self) -> OptimizerMemory:
        """The bytes of optimizer state, here and with `update="worker"`. With dedicated servers none are here."""
        if self.server is not None:
            return OptimizerMemory(*self.server.state_bytes())
        tensors = [value for state in self.state.values() for value in state.values()]
        tensors = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
        size = sum(held_bytes(value) for value in tensors if isinstance(value, torch.Tensor) and value.dim())
        return OptimizerMemory(size, size)

    @property
    def priority_threshold(self) -> float | None:
        """The present threshold: layers whose urgency is above it are exchanged in class 0.

        None if there is nothing to decide: with one worker, with priority_threshold=coarse, or where backward waits.
        """
        priorities = None if self.model.synchronizer is None else self.model.synchronizer.layers.priorities
        return None if priorities is None else priorities.threshold

    @property
    def priority_threshold_found(self) -> bool:
        """Whether the search for the threshold, if any, is over."""
        priorities = None if self.model.synchronizer is None else self.model.synchronizer.layers.priorities
        return priorities is None or priorities.settled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer. Raises InvalidArgument with updates on the servers."""
        update = self._whole or self._worker
        if update is None and self.server is None:
            super().add_param_group(param_group)  # from Optimizer.__init__
            return
        if update is None or self._on_servers:
            raise InvalidArgument("add all parameter groups to the optimizer before DistributedOptimizer takes it")
        self._inner.add_param_group(param_group)
        update.take(self._entries_in(self.param_groups[-1]["params"]))

    def __getattr__(self, name: str) -> Any:
        # An optimizer of unknown kind may have calls of its own, such as train() and eval().
        if name.startswith("_") or vars(self).get("_whole") is None:
            raise AttributeError(f"a DistributedOptimizer has no attribute {name!r}")
        return getattr(self._inner, name)

    grad_scale = _scaling("grad_scale", 1)
    found_inf = _scaling("found_inf", None)

    def __repr__(self) -> str:
        return f"DistributedOptimizer(update='{'server' if self._on_servers else 'worker'}', {self._inner!r})"
