"""State that torch's own loading leaves out or changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class ExtraState:
    """What a module keeps beside parameters and buffers: `get_extra_state` and `set_extra_state`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """What the module gives."""
        return {"extra": self._module.get_extra_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives it back."""
        self._module.set_extra_state(state["extra"])


def extra_states(module: nn.Module) -> Iterator[ExtraState]:
    """Those of the module and of all inside, in their order."""
    for one in module.modules():
        if type(one).get_extra_state is not nn.Module.get_extra_state:
            yield ExtraState(one)


def load_exactly(one: Any, state: Mapping[str, Any]) -> None:
    """`load_state_dict`, and the dtypes that the state has: an optimizer's load casts them to the parameter's."""
    one.load_state_dict(state)
    if not isinstance(one, Optimizer) or not {"state", "param_groups"} <= state.keys():
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [param for group in one.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in state["state"].get(number, {}).items():
            loaded = one.state[param].get(name)
            if isinstance(loaded, torch.Tensor) and isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                one.state[param][name] = value.to(loaded.device, copy=True)
