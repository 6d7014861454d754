"""What DistributedOptimizer refuses of its arguments, before anything is exchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.optimizer.succession import Trained
from poseidon.torch.optimizer.wrapper import OptimizerWrapper


def check_arguments(optimizer: Any, model: Any, update: str | None, aggregator: str) -> None:
    """InvalidArgument, saying what to pass instead, for arguments that do not fit."""
    if update not in (None, "worker", "server"):
        raise InvalidArgument(f"update is {update!r}: pass 'worker' (the default) or 'server'")
    if isinstance(optimizer, OptimizerWrapper):
        raise InvalidArgument(
            "the optimizer is a poseidon.DistributedOptimizer already: wrap the torch optimizer itself, and once"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        kind = type(optimizer).__name__
        raise InvalidArgument(
            f"the optimizer is another one's {kind}: pass the optimizer that is inside (.optimizer), and put the "
            f"{kind} around the DistributedOptimizer"
        )
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgument(
            f"optimizer is of type {type(optimizer).__name__} and must be a torch.optim.Optimizer: pass the "
            "optimizer first, and then the model"
        )
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgument(
            f"DistributedOptimizer needs the poseidon.DistributedDataParallel, not a {type(model).__name__}"
        )
    if aggregator != "sum" and model.synchronizer is None:
        raise InvalidArgument(
            f"aggregator={aggregator!r} is what servers do with the gradients of several workers: pass "
            "update='server', and leave it out with one worker"
        )


def features_of(
    optimizer: Optimizer,
    model: Trained,
    update: str,
    max_norm: float | None,
    clip: str,
    resume: bool,
    aggregator: str,
) -> Features:
    """The features of a `DistributedOptimizer` with these arguments.

    Raises InvalidArgument if they exclude each other, or one that the job or the model has.
    """
    settings, kind = model.context.settings, type(optimizer).__name__
    values = {
        "distributed_optimizer": "",
        f"update_{update}": "",
        "aggregator": repr(aggregator) if aggregator != "sum" else None,
        "resume": "" if resume else None,
        "max_norm": "" if max_norm is not None else None,
        "clip_previous": "" if max_norm is not None and clip == "previous" else None,
        "server_unsaved": "" if update == "server" and not settings.checkpoint_dir else None,
        "one_version": "" if update == "server" and settings.checkpoint_keep < 2 else None,
        "lbfgs": kind if isinstance(optimizer, torch.optim.LBFGS) else None,
        "scaling_optimizer": None if isinstance(optimizer, torch.optim.SGD) else kind,
    }
    found = Features(within=model.features)
    given = {param for group in optimizer.param_groups for param in group["params"]}
    for entry in model.entries:
        if entry.form.is_sparse and entry.whole in given:
            found.add("sparse", entry.name)
    for name, value in values.items():
        if value is not None:
            found.add(name, value)
    return found
