"""Residuals of lossy schemes and wire formats in a model's `state_dict()`: what this rank has not sent yet.

They are the extra state of the wrapper, in the form in which torch's modules have one. A model without such layers
has none, so that its `state_dict()` stays that of torch's class.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from poseidon.torch.training.trained_model import TrainedModel

_KEY = "_extra_state"  # torch's name of it


def keep_in_state_dict(model: nn.Module) -> None:
    """Makes `state_dict()` and `load_state_dict()` of this wrapper include the residuals of this rank."""
    model._register_state_dict_hook(_add)
    model._register_load_state_dict_pre_hook(_take, with_module=True)  # torch 2.4 has no public name for it


def _add(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    trained: TrainedModel | None = model._trained
    if trained is None or trained.sync is None or not any(entry.asked.may_lose for entry in trained.entries):
        return
    residuals = {layer.name: torch.from_numpy(residual) for layer, residual in trained.sync.layers.residuals().items()}
    state[prefix + _KEY] = {"rank": trained.context.rank, "residuals": residuals}


def _take(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    kept = state.pop(prefix + _KEY, None)
    trained: TrainedModel | None = model._trained
    if trained is None or trained.sync is None or not any(entry.asked.may_lose for entry in trained.entries):
        return
    if kept is None or kept["rank"] != trained.context.rank:
        whose = "has no residuals" if kept is None else f"has the residuals of rank {kept['rank']}"
        warnings.warn(
            f"the loaded state {whose}, so rank {trained.context.rank} starts without what lossy schemes or wire "
            "formats had not sent: save and load model.state_dict() on every rank to keep it",
            stacklevel=4,
        )
        trained.sync.layers.load_residuals({})
        return
    by_name = {entry.name: entry for entry in trained.entries}
    trained.sync.layers.load_residuals(
        {by_name[name]: residual.numpy() for name, residual in kept["residuals"].items() if name in by_name}
    )
