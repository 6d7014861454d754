"""DistributedOptimizer: a torch optimizer whose updates happen as part of the exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from poseidon.errors import InvalidArgument
from poseidon.torch.context import context
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.layers import SyncedParameter
from poseidon.torch.memory import is_dense
from poseidon.torch.rules import algorithm_of, check_dtype, check_options
from poseidon.torch.server_update import ServerUpdate
from poseidon.torch.verify import check_same

_STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of optimizer state (momentum, moments)."""

    this_process: int  # in this worker and the shard that it hosts
    worker_side: int  # what the optimizer would hold in every worker


class DistributedOptimizer(Optimizer):
    """Trains the parameters of `optimizer` with updates on the servers (`update="server"`).

    The servers hold the parameters and the optimizer's state, sharded. Workers push gradients as
    their backward ends and receive the updated parameters; `step()` computes nothing. The bits are
    those of `optimizer` under `DistributedDataParallel(scheme="ps")`. With one worker the
    optimizer itself runs.

    `optimizer`: torch.optim.SGD, Adam or AdamW over float32 or float64 parameters that `model`
    synchronizes; replace it by this object. `param_groups`, hooks and learning-rate schedulers work
    as before. Afterwards, all ranks hold rank 0's parameters.

    Collective: every rank wraps the same optimizer. Raises InvalidArgument, saying what to use
    instead, for what servers cannot update, Mismatch where the ranks' optimizers differ.
    docs/server-update.md says what is exact and what is refused.
    """

    def __init__(self, optimizer: Optimizer, model: DistributedDataParallel, update: str | None = None) -> None:
        if update != "server":
            given = "" if update is None else f", not update={update!r}"
            raise InvalidArgument(f"DistributedOptimizer updates on the servers: pass update='server'{given}")
        if not isinstance(model, DistributedDataParallel):
            raise InvalidArgument(
                f"DistributedOptimizer needs the poseidon.DistributedDataParallel, not a {type(model).__name__}"
            )
        algorithm = algorithm_of(optimizer)
        groups = _entries_of(optimizer, model)
        self._inner = optimizer
        self._update: ServerUpdate | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        shared_hooks: tuple[str, ...] = _STATE_DICT_HOOKS
        if (sync := model.synchronizer) is not None:
            here = context()
            assert here.client is not None
            assert here.control is not None
            check_same(here.control, _describe(algorithm.name, groups, self.param_groups), "optimizer")
            sync.store([entry for group in groups for entry in group])
            self._update = ServerUpdate(here.client, here.control, algorithm, groups, self.param_groups)
            self._hand_over_state()
            sync.updates.append(self._update)
            shared_hooks += _STEP_HOOKS
        for name in shared_hooks:
            setattr(self, name, getattr(optimizer, name))
        # GradScaler would otherwise change gradients that have been used already; so it says what it wants.
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Ends a step that backward has made. `closure`, if given, is called once and runs that backward.

        PoseidonError where the optimizer itself would now do something else than the servers did:
        without a synchronizing backward, or after changes to gradients or hyperparameters since.
        """
        self._inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers that were made with it
        if self._update is None:
            step = type(self._inner).step
            return step(self._inner) if closure is None else step(self._inner, closure)  # type: ignore[return-value]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What the torch optimizer's own state_dict() would be. Pulls the state; any rank may call it alone."""
        if self._update is None:
            return super().state_dict()
        self.state.update(self._update.pull_states())
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class or of the torch optimizer.

        Collective: every rank passes the same. Also makes rank 0's parameters everybody's, so load the
        model's before.
        """
        check_options(state_dict["param_groups"])
        super().load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The last thing that Optimizer.load_state_dict does; each optimizer has its own way with old checkpoints.
        self._inner.__setstate__(state)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        if self._update is not None:
            self._update.param_groups = self.param_groups
            self._hand_over_state()

    def _hand_over_state(self) -> None:
        assert self._update is not None
        self._update.load_states(self.state)
        self.state.clear()

    def push_parameters(self) -> None:
        """Makes rank 0's parameters the servers' and everybody's; the optimizer's state stays.

        Collective. Needed after parameters were changed on the workers (`model.load_state_dict`, an edit).
        """
        if self._update is not None:
            self._update.push_parameters()

    def memory(self) -> OptimizerMemory:
        """Where the optimizer's state is. With dedicated servers this process has none."""
        if self._update is not None:
            return OptimizerMemory(*self._update.state_bytes())
        tensors = [value for state in self.state.values() for value in state.values()]
        size = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor) and value.dim())
        return OptimizerMemory(size, size)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """InvalidArgument: the servers have been told which parameters there are."""
        if "_step_supports_amp_scaling" in vars(self):
            raise InvalidArgument("add all parameter groups to the optimizer before DistributedOptimizer takes it")
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"DistributedOptimizer(update='server', {self._inner!r})"

    def __getstate__(self) -> NoReturn:
        raise InvalidArgument(
            "a DistributedOptimizer cannot be copied or pickled, since its state is on the servers: save state_dict()"
        )

    def _refuse_scaling(self, _: Any) -> None:
        raise InvalidArgument(
            "GradScaler and update='server' exclude each other: backward has applied the scaled gradients already; "
            "use torch.autocast with bfloat16, which needs no scaling, or the optimizer without DistributedOptimizer"
        )

    # What GradScaler.step() sets on an optimizer that scales by itself.
    grad_scale = property(lambda self: 1, _refuse_scaling)
    found_inf = property(lambda self: None, _refuse_scaling)


def _entries_of(optimizer: Optimizer, model: DistributedDataParallel) -> list[list[SyncedParameter]]:
    """The parameters of each group that the servers will update; InvalidArgument for those that they cannot."""
    synced = {entry.param: entry for entry in model.synced_parameters}
    names = {param: name for name, param in model.module.named_parameters()}
    groups: list[list[SyncedParameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        entries = []
        for index, param in enumerate(group["params"]):
            entry = synced.get(param)
            if entry is None and param in names and (not param.requires_grad or param.numel() == 0):
                continue  # never updated
            if entry is None:
                name = names.get(param, f"{index} of group {number}")
                raise InvalidArgument(
                    f"parameter {name} of the optimizer is not synchronized by the model: give it an optimizer of its "
                    "own, without DistributedOptimizer"
                )
            if entry.stored is not None:
                raise InvalidArgument(f"parameter {entry.name} is updated by another DistributedOptimizer already")
            check_dtype(entry.name, param)
            entries.append(entry)
        groups.append(entries)
    _refuse_overlaps([entry for entries in groups for entry in entries])
    return groups


def _refuse_overlaps(entries: list[SyncedParameter]) -> None:
    """Servers update each parameter on its own, and the results must not meet in memory."""
    dense = [entry for entry in entries if is_dense(entry.param)]
    dense.sort(key=lambda entry: entry.param.data_ptr())
    for first, second in pairwise(dense):
        if first.param.data_ptr() + first.param.nbytes > second.param.data_ptr():
            raise InvalidArgument(
                f"parameters {first.name} and {second.name} share memory: make them one parameter, or use the "
                "optimizer itself, without DistributedOptimizer"
            )


def _describe(name: str, groups: list[list[SyncedParameter]], param_groups: list[dict[str, Any]]) -> str:
    lines = [name]
    for entries, group in zip(groups, param_groups, strict=True):
        options = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        lines.append(f"{options} for {', '.join(entry.name for entry in entries)}")
    return "\n".join(lines)
