"""Which optimizers are known to update each parameter from its own gradient and state alone."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from poseidon.errors import InvalidArgument

INSTEAD = "use the optimizer itself with the model, without DistributedOptimizer"

# Exact classes: a subclass may do anything in addition. Some are not in every version of torch.
_OF_TORCH = frozenset(
    {
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "Adafactor",
        "Muon",
    }
)
# Of other libraries: those whose source was read (timm 1.0.31, transformers 5).
_OF_OTHERS = frozenset(
    {
        "timm.optim.adamp.AdamP",
        "timm.optim.lion.Lion",
        "timm.optim.nvnovograd.NvNovoGrad",
        "timm.optim.rmsprop_tf.RMSpropTF",
        "transformers.optimization.Adafactor",
    }
)


def updates_per_parameter(optimizer: Optimizer, said: bool) -> bool:
    """Whether the optimizer gives the same bits when it steps parameter by parameter.

    It is known of some classes; of others the user has to have `said` so. InvalidArgument for one that cannot be used.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise InvalidArgument(
            f"{name} searches along a direction that all gradients together give, with several backward passes, so "
            f"layers cannot be updated one by one: {INSTEAD}"
        )
    if said and not has_own_step(optimizer) and "step" in vars(optimizer):
        raise InvalidArgument(
            f"this {name} has a step() of its own, put there after it was made, which would not be called layer by "
            "layer: leave per_parameter out"
        )
    return said or (is_known(optimizer) and not optimizer.defaults.get("differentiable"))


# Of torch's, those that treat each element on its own. So a step of DTensors sends nothing, and ranks with parts of one
# parameter may make it in different orders.
_BY_ELEMENT = _OF_TORCH - {"Adafactor", "Muon", "SparseAdam"}


def updates_by_element(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to update each element from its own gradient and state alone."""
    kind = type(optimizer)
    return kind.__name__ in _BY_ELEMENT and is_known(optimizer) and kind.__module__.startswith("torch.")


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is of a class in these lists, with that class's step()."""
    kind = type(optimizer)
    is_torchs = kind.__name__ in _OF_TORCH and kind is getattr(torch.optim, kind.__name__, None)
    return (is_torchs or f"{kind.__module__}.{kind.__qualname__}" in _OF_OTHERS) and has_own_step(optimizer)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether step() is the one that the library of its class wrote, perhaps within wrappers of torch's.

    Such a wrapper runs hooks, or counts calls for a learning-rate scheduler. Another one, put on the class or on the
    object, may do anything.
    """
    kind = type(optimizer)
    homes = tuple(_folder(root) for root in ("torch", kind.__module__.partition(".")[0]))
    step: Any = vars(optimizer).get("step", kind.step)
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(homes):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _folder(package: str) -> str:
    """Where the package's files lie; for a script, its own file."""
    file = getattr(sys.modules.get(package), "__file__", None) or "<unknown>"
    return os.path.dirname(file) + os.sep if os.path.basename(file).startswith("__init__.") else file
