"""From a torch optimizer to the rule by which servers update: what they can do, and what is refused.

That includes groups that have other parameters than when the servers were told of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.known import is_known
from poseidon.torch.tensors.memory import is_dense

# What each option asks for that servers do not do.
_REFUSED_OPTIONS = {
    "amsgrad": "keeps a third array",
    "differentiable": "differentiates through the update",
    "capturable": "runs inside a CUDA graph",
}


@dataclass(frozen=True)
class Algorithm:
    """One of the supported optimizers. `state_names`: of the arrays that it keeps, in the servers' order."""

    name: str
    state_names: tuple[str, ...]
    counts_steps: bool

    def rule(self, group: Mapping[str, Any], keeps_gradient: bool, aggregator: str) -> _core.UpdateRule:
        """The rule for one parameter group as it is now; servers may keep the gradient of the last update."""
        shared: dict[str, Any] = {
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
            "keeps_gradient": keeps_gradient,
            "aggregator": aggregator,
        }
        if self.name == "SGD":
            return _core.UpdateRule(
                "sgd",
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                nesterov=bool(group["nesterov"]),
                **shared,
            )
        beta1, beta2 = map(float, group["betas"])
        kind = "adamw" if self._decouples(group) else "adam"
        return _core.UpdateRule(kind, beta1=beta1, beta2=beta2, eps=float(group["eps"]), **shared)

    def _decouples(self, group: Mapping[str, Any]) -> bool:
        # Newer versions of torch make AdamW an Adam with this option; Adam itself has it, too.
        return bool(group.get("decoupled_weight_decay", self.name == "AdamW"))


_ALGORITHMS: dict[type[Optimizer], Algorithm] = {
    SGD: Algorithm("SGD", ("momentum_buffer",), counts_steps=False),
    AdamW: Algorithm("AdamW", ("exp_avg", "exp_avg_sq"), counts_steps=True),
    Adam: Algorithm("Adam", ("exp_avg", "exp_avg_sq"), counts_steps=True),
}


def algorithm_of(optimizer: Optimizer) -> Algorithm:
    """The algorithm of a torch optimizer; InvalidArgument, saying what to use, where servers cannot run it."""
    algorithm = _ALGORITHMS.get(type(optimizer))
    if algorithm is None or not is_known(optimizer):
        raise InvalidArgument(
            f"servers cannot run {type(optimizer).__name__}: update='server' takes torch.optim.SGD, Adam and AdamW "
            "themselves, not subclasses, with their own step(); use update='worker' for any other"
        )
    check_options(optimizer.param_groups)
    return algorithm


def check_options(groups: list[dict[str, Any]]) -> None:
    """InvalidArgument if a parameter group asks for something that servers do not do."""
    for number, group in enumerate(groups):
        for option, why in _REFUSED_OPTIONS.items():
            if group.get(option):
                raise InvalidArgument(
                    f"parameter group {number} has {option}=True, which {why}: leave it out, "
                    "or use the optimizer itself, without DistributedOptimizer"
                )


UPDATED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Of parameters that servers update."""


def _check_updatable(entry: SyncedParameter) -> None:
    """InvalidArgument for a parameter that servers do not update."""
    name, param = entry.name, entry.param
    if param.is_complex():
        raise InvalidArgument(
            f"parameter {name} has dtype {param.dtype}; servers update real numbers only: use update='worker'"
        )
    if param.dtype not in UPDATED_DTYPES:
        raise InvalidArgument(
            f"parameter {name} has dtype {param.dtype}; servers update float32, float64 and bfloat16: keep the "
            "parameters in float32 and compute under torch.autocast, or use the optimizer itself, without "
            "DistributedOptimizer"
        )


def check_aggregator(aggregator: str, entries: Iterable[SyncedParameter]) -> None:
    """InvalidArgument for a parameter whose gradients have fewer bits than an aggregator other than the sum takes."""
    for entry in entries:
        if aggregator != "sum" and (entry.asked.wire != "fp32" or entry.has_masters):
            raise InvalidArgument(
                f"the gradients of parameter {entry.name} travel in fewer bits than the servers keep, which the "
                f"aggregator {aggregator} does not take: use wire fp32 and float32 parameters, or aggregator='sum'"
            )


def entries_of(
    optimizer: Optimizer, module: nn.Module, synced_parameters: Sequence[SyncedParameter]
) -> list[list[SyncedParameter]]:
    """The parameters of each group that the servers will update; InvalidArgument for those that they cannot."""
    synced = {entry.param: entry for entry in synced_parameters}
    names = {param: name for name, param in module.named_parameters()}
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
            entry.check_free()
            _check_updatable(entry)
            entries.append(entry)
        groups.append(entries)
    refuse_overlaps(
        [entry for entries in groups for entry in entries], "use the optimizer without DistributedOptimizer"
    )
    return groups


def refuse_overlaps(entries: Iterable[SyncedParameter], instead: str) -> None:
    """InvalidArgument if results for two parameters, each received on its own, would meet in memory.

    `instead` says what else the user can do.
    """
    dense = [entry for entry in entries if is_dense(entry.param)]
    dense.sort(key=lambda entry: entry.param.data_ptr())
    for first, second in pairwise(dense):
        if first.param.data_ptr() + first.param.nbytes > second.param.data_ptr():
            raise InvalidArgument(
                f"parameters {first.name} and {second.name} share memory: make them one parameter, or {instead}"
            )


_ADVICE = (
    "the servers learn the groups when DistributedOptimizer is made. To stop a parameter's updates, freeze it with "
    "requires_grad_(False) and leave it in its group; for other groups make a torch optimizer with them and another "
    "DistributedOptimizer of that, or pass update='worker'"
)


class GroupMembers:
    """The parameters of each group at first. `names` has what errors call them."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
        self._members = [_members(group) for group in param_groups]
        self._names = names

    def check(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """InvalidArgument unless the groups have the same parameters still. Their order does not matter."""
        if len(param_groups) != len(self._members):
            raise InvalidArgument(
                f"the optimizer had {len(self._members)} parameter groups and has {len(param_groups)} now: {_ADVICE}"
            )
        for number, (group, members) in enumerate(zip(param_groups, self._members, strict=True)):
            now = _members(group)
            lost = [self._name(param) for param in members if param not in now]
            got = [self._name(param) for param in now if param not in members]
            if lost or got:
                what = f"lost {lost[0]}" if lost else f"got {got[0]}"
                raise InvalidArgument(f"parameter group {number} of the optimizer has {what}: {_ADVICE}")

    def _name(self, param: torch.Tensor) -> str:
        return f"parameter {self._names[param]}" if param in self._names else "another parameter"


def _members(group: Mapping[str, Any]) -> dict[torch.Tensor, None]:
    return dict.fromkeys(group.get("params", ()))  # a key equals itself alone: the hash of a tensor is its identity
