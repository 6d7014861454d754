"""Which parameters the groups of an optimizer had when the servers were told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poseidon.errors import InvalidArgument

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
