"""Updates that overlap with communication, for Accelerate and Trainer."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer

transformers: Any = None  # where there is Accelerate alone
with suppress(ImportError):
    transformers = importlib.import_module("transformers")
TrainerCallback: Any = object if transformers is None else transformers.TrainerCallback


def overlap(optimizer: Any, model: Any, **arguments: Any) -> DistributedOptimizer:
    """Puts a DistributedOptimizer inside `optimizer`, around the optimizer that it contains, and returns it.

    `optimizer` and `model` are what `accelerator.prepare()` has returned; `arguments` are DistributedOptimizer's, such
    as `update="server"`. Collective. Raises InvalidArgument if the model is not wrapped by Poseidon.
    """
    if not hasattr(optimizer, "optimizer"):
        raise InvalidArgument(
            f"overlap() needs the optimizer that accelerator.prepare() returned, not a {type(optimizer).__name__}: "
            "prepare it first"
        )
    inside = DistributedOptimizer(optimizer.optimizer, _wrapper_of(model), **arguments)
    optimizer.optimizer = inside
    return inside


class OverlapCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a Trainer train with a DistributedOptimizer: `trainer.add_callback(OverlapCallback(trainer))`.

    `arguments` are DistributedOptimizer's. Trainer clips gradients, and for this it waits for all of them. To overlap
    with the next forward pass, pass it `max_grad_norm=0`, and pass `max_norm=1.0, clip="previous"` here.
    """

    def __init__(self, trainer: Any, **arguments: Any) -> None:
        self._trainer = trainer
        self._arguments = arguments

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Puts the DistributedOptimizer in place. Trainer has just prepared model and optimizer."""
        optimizer, model = self._trainer.optimizer, self._trainer.model_wrapped
        inside = optimizer.optimizer
        if not isinstance(inside, DistributedOptimizer):
            overlap(optimizer, model, **self._arguments)
        elif inside.model is not _wrapper_of(model):  # it stays for a next call of train(), as the wrapper does
            raise InvalidArgument("Trainer has wrapped the model anew, past its optimizer: make a new Trainer as well")


def _wrapper_of(model: Any) -> DistributedDataParallel:
    wrapper = getattr(model, "_orig_mod", model)  # what torch.compile made of it
    if not isinstance(wrapper, DistributedDataParallel):
        raise InvalidArgument(
            f"the prepared model is a {type(wrapper).__module__}.{type(wrapper).__name__}, not Poseidon's "
            "DistributedDataParallel: start with `poseidon run --drop-in`, or call poseidon.torch.replace_ddp() before "
            "the model is prepared"
        )
    return wrapper
