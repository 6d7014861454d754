"""What DistributedOptimizer refuses of its arguments, before anything is exchanged."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from poseidon.errors import InvalidArgument
from poseidon.options import Settings
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.optimizer.wrapper import OptimizerWrapper


def check_arguments(
    optimizer: Any, model: Any, update: str | None, max_norm: float | None, resume: bool, aggregator: str
) -> None:
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
    if model.comm_hook_name and model.synchronizer is not None and model.synchronizer.hooked is not None:
        raise InvalidArgument(
            f"DistributedOptimizer and the communication hook {model.comm_hook_name} exclude each other: use the "
            "optimizer itself, or leave register_comm_hook() out"
        )
    if update == "server" and max_norm is not None:
        raise InvalidArgument("the servers see one gradient at a time: clip with update='worker', which has max_norm")
    if resume and update != "server":
        raise InvalidArgument("resume takes what servers have saved: with updates on the workers use load_state_dict()")
    if aggregator != "sum" and (update != "server" or model.synchronizer is None):
        raise InvalidArgument(
            f"aggregator={aggregator!r} is what servers do with the gradients of several workers: pass "
            "update='server', and leave it out with one worker"
        )


def refuse_what_is_lost(
    settings: Settings, update: str | None, max_norm: float | None, clip: str, resume: bool
) -> None:
    """Refuses, with on_failure=rejoin or shrink, settings whose state a replacement could not be given."""
    if update == "server" and not settings.checkpoint_dir:
        raise InvalidArgument(
            "update='server' keeps parameters and optimizer state on the servers, which may be lost: with "
            f"on_failure={settings.on_failure} set checkpoint_dir, from which they go on, or use update='worker'"
        )
    if update == "server" and settings.checkpoint_keep < 2:
        raise InvalidArgument(
            "checkpoint_keep=1 leaves nothing to go back to while the workers end the step of the newest checkpoint: "
            f"with on_failure={settings.on_failure} keep 2 or more"
        )
    if resume:
        raise InvalidArgument(
            f"with on_failure={settings.on_failure} Recovery goes on from checkpoint_dir by itself: leave resume out"
        )
    if max_norm is not None and clip == "previous":
        raise InvalidArgument(
            "clip='previous' needs the norm of the step before, which a worker that replaces another does not have: "
            "use clip='gathered' with on_failure=rejoin or shrink, or on_failure=abort"
        )
