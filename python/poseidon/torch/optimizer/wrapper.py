"""What all optimizers around one of torch's have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from poseidon.errors import InvalidArgument

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
NO_HYPERPARAMETERS = ("params", "param_names")
"""What a parameter group says beside its hyperparameters."""

STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class OptimizerWrapper(Optimizer):
    """An optimizer that uses another one, whose parameter groups it has as its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._inner: Any = SimpleNamespace()  # holds what the next line makes, which nobody needs
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._inner = optimizer

    def share_hooks(self, *kinds: str) -> None:
        """Makes the other optimizer's hooks of these kinds this one's, and the other way round."""
        for kind in kinds:
            setattr(self, kind, getattr(self._inner, kind))

    # It is the optimizer's own, also for objects that take this one's class and ask it for everything else.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The optimizer's parameter groups."""
        return self._inner.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = param_groups

    def __getstate__(self) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} cannot be copied or pickled, since it belongs to this process's job: "
            "save state_dict()"
        )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure returns, which runs backward; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def described(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> str:
    """A text about what must be the same on all ranks; `names` has those of each group's parameters."""
    lines = [type(optimizer).__name__]
    for group_names, group in zip(names, optimizer.param_groups, strict=True):
        options = {key: value for key, value in sorted(group.items()) if key not in NO_HYPERPARAMETERS}
        lines.append(f"{options} for {', '.join(group_names)}")
    return "\n".join(lines)
