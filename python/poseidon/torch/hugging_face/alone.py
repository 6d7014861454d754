"""Accelerate in a job whose workers may be replaced: it sees one process, and Poseidon alone knows of the others.

Accelerate's own exchanges, such as those at the beginning of an epoch, wait for processes that were there at the start.
A replacement would wait in them alone.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from poseidon.errors import InvalidArgument
from poseidon.torch.process.context import context, init
from poseidon.torch.recovery.recovery import Recovery

_local_rank = 0  # among the workers of this machine
_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *(f"{launcher}_{what}" for launcher in ("PMI", "OMPI_COMM_WORLD", "MV2_COMM_WORLD") for what in ("RANK", "SIZE")),
)


def init_alone(**options: Any) -> None:
    """`poseidon.init(**options)`, after which Accelerate and Trainer see one process with one accelerator.

    Call it before an Accelerator or TrainingArguments is made, and before CUDA is used. It removes the variables that
    tell a process of the others. On a machine with several GPUs the worker keeps the one of its LOCAL_RANK. Raises
    InvalidArgument if Accelerate has already made a group of processes, and what `poseidon.init` raises.
    """
    accelerate = _accelerate()
    if accelerate.PartialState._shared_state.get("num_processes", 1) > 1:
        raise InvalidArgument(
            "Accelerate has already met the other processes, and cannot meet a replacement: call init_alone() before "
            "the program makes TrainingArguments or an Accelerator"
        )
    global _local_rank
    init(**options)
    local_rank = os.environ.get("LOCAL_RANK")
    _local_rank = int(local_rank or 0)
    if local_rank is not None and torch.cuda.device_count() > 1:
        if torch.cuda.is_initialized():
            raise InvalidArgument("init_alone() after CUDA was used: call it first, so that a worker takes its own GPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = _visible()[_local_rank]
    for name in _PLACE:
        os.environ.pop(name, None)


def recovery_of(accelerator: Any, *objects: Any, **arguments: Any) -> Recovery:
    """A `poseidon.Recovery` of what `accelerator` has prepared: models, optimizers, schedulers, and its GradScaler.

    Wrap the model in `poseidon.DistributedDataParallel` before it is prepared. `objects` are further ones;
    `arguments` are Recovery's, such as `seed`. Collective, as Recovery is. Raises InvalidArgument for a prepared
    DataLoader, whose batches would be the same on all workers.
    """
    if accelerator.num_processes > 1:
        raise InvalidArgument(
            "Accelerate has met the other processes, and cannot meet a replacement: call init_alone() of "
            "poseidon.torch.hugging_face first, in the place of poseidon.init()"
        )
    number_processes()
    if accelerator._dataloaders:
        _refuse_loader()
    accelerator.prepare_data_loader = _refuse_loader
    found = [
        *accelerator._models,
        *(one.optimizer for one in accelerator._optimizers),
        *(one.scheduler for one in accelerator._schedulers),
        *accelerator._custom_objects,
    ]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    accelerator.no_sync = lambda model: getattr(model, "no_sync", nullcontext)()  # it would exchange in every pass
    return Recovery(*found, *scaler, _Passes(accelerator), *objects, **arguments)


class _Passes:
    """How many backward passes Accelerate has counted, by which it knows the last one of a step."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["passes"]


def _refuse_loader(*_: Any, **__: Any) -> NoReturn:
    raise InvalidArgument(
        "a DataLoader that Accelerate has prepared gives all workers the same batches, because it knows of one process "
        "alone: leave loaders out of prepare(), and take the batch of recovery.step and poseidon.rank(), or use "
        "poseidon.ElasticLoader"
    )


def number_processes() -> None:
    """Makes the process of rank 0 the one that writes files and prints, as it is in a job of several processes."""
    state = _accelerate().PartialState()
    state.process_index, state.local_process_index = context().rank, _local_rank


def _accelerate() -> Any:
    try:
        import accelerate
    except ImportError:
        raise InvalidArgument("poseidon.torch.hugging_face needs Accelerate: pip install accelerate") from None
    return accelerate


def _visible() -> list[str]:
    """The GPUs of this process, by the names that CUDA knows."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
