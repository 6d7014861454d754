"""`Replica`: a module's parameters as the check of the replicas looks at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.replica_check import Parameters, ReplicaCheck, processor_name
from poseidon.torch.tensors.devices import is_accelerator, runtime_of
from poseidon.torch.tensors.memory import host_bytes
from poseidon.torch.tensors.modes import update_mode
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import unnoticed

_PIECE = 1 << 22  # elements on a device whose digest is taken at once, so that it takes little memory
_FACTOR = 0x9E3779B185EBCA87 - (1 << 64)  # of XXH64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


_replicas: weakref.WeakSet[Replica] = weakref.WeakSet()  # whose parameters optimizers of the program may update
_registered: list[Any] = []


class Unwatched:
    """What a synchronizer tells of its steps: here nobody compares the ranks' parameters."""

    def connect(self, control: Control) -> None:
        """Collective: the ranks of `control` are those of the job from now on."""

    def begin_step(self) -> None:
        """A backward pass of all ranks begins, with no update under way. Raises Mismatch if the ranks have differed."""

    def look(self) -> None:
        """Raises Mismatch if the ranks differed when the step began, without waiting for the next one."""


class Replica(Unwatched, Parameters):
    """All parameters of a module that are meant to be equal on all ranks, frozen ones, too.

    `ignored` names those that are each rank's own. Rows of embeddings with a max_norm are changed by forward passes on
    each rank alone, so these are left out, too.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], check: ReplicaCheck) -> None:
        self._module = weakref.ref(module)  # no cycle by the hooks of its parameters
        self._check = check
        self.paused: Callable[[], bool] = lambda: False  # whether ranks make different steps at the moment
        self._left_out = set(ignored)
        for name, part in module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
                self._left_out.add(f"{name}.weight" if name else "weight")

    def connect(self, control: Control) -> None:
        self._check.connect(control)

    def begin_step(self) -> None:
        module = self._module()
        if module is None or self.paused():
            return
        # To go through the parameters takes time in a model that has thousands, and few steps need it.
        params = list(module.parameters()) if self._check.is_due else []
        with update_mode(params[0].device) if params else nullcontext(), unnoticed(params):
            self._check.begin_step(self)

    def look(self) -> None:
        module = self._module()
        if module is not None and not self.paused() and self._check.awaits:
            with unnoticed(module.parameters()):
                self._check.look(self)

    def confirm_by(self, updates_here: Callable[[], bool], settle: Callable[[], None]) -> None:
        """A difference counts where it is still there after an update. `updates_here`: whether optimizers of this
        process update the parameters at the moment. `settle` waits for updates that step() has put off.
        """
        self._check.confirms = updates_here
        self._settle = settle
        _replicas.add(self)
        if not _registered:
            _registered.append(register_optimizer_step_post_hook(_updated))

    def updated(self, optimizer: Optimizer) -> None:
        """Some optimizer has made a step. Raises Mismatch if the ranks have differed."""
        module = self._module()
        if module is None or not self._check.wants_update or self.paused() or not self._check.confirms():
            return
        params = list(module.parameters())
        known = {param.whole if isinstance(param, Shard) else param for param in params}
        if any(param in known for group in optimizer.param_groups for param in group["params"]):
            self._settle()
            with update_mode(params[0].device), unnoticed(params):
                self._check.updated(self)

    def averaged(self, number: int) -> None:
        """The ranks' parameters have become equal for the `number`-th time. Raises Mismatch if they have not."""
        module = self._module()
        if module is not None:
            params = list(module.parameters())
            with update_mode(params[0].device), unnoticed(params):
                self._check.begin_step(self, number)
                self._check.look(self)

    def _tensors(self) -> dict[str, torch.Tensor]:
        module = self._module()
        params = {} if module is None else dict(module.named_parameters())
        return {
            name: param.detach() for name, param in params.items() if name not in self._left_out and _has_bytes(param)
        }

    def _device(self) -> torch.device:
        return next((tensor.device for tensor in self._tensors().values()), torch.device("cpu"))

    def names(self) -> list[str]:
        return list(self._tensors())

    def wait(self) -> None:
        device = self._device()
        if is_accelerator(device):
            runtime_of(device).current_stream(device).synchronize()

    def digests(self) -> list[int]:
        tensors = list(self._tensors().values())
        on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        if on_device:
            device = torch.stack([_device_digest(tensor) for tensor in on_device]).tolist()
            from_device = iter([digest % (1 << 64) for digest in device])
        return [
            _core.digest(host_bytes(tensor)) if tensor.device.type == "cpu" else next(from_device) for tensor in tensors
        ]

    def values(self, index: int) -> tuple[str, NDArray[np.float64]]:
        tensor = list(self._tensors().values())[index]
        wide = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        name = str(wide.dtype).removeprefix("torch.")
        return name, wide.to("cpu", torch.float64, copy=True).reshape(-1).numpy()

    def surroundings(self) -> str:
        device = self._device()
        name = runtime_of(device).get_device_name(device) if is_accelerator(device) else device.type
        capability = torch.backends.cpu.get_cpu_capability()
        return (
            f"{processor_name()} ({capability}, {torch.get_num_threads()} threads), device {name}, "
            f"torch {torch.__version__}"
        )


def _updated(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for replica in list(_replicas):
            replica.updated(optimizer)


def _has_bytes(param: torch.Tensor) -> bool:
    plain = param.layout == torch.strided and not param.is_meta and not param.is_quantized
    return plain and not is_traceable_wrapper_subclass(param)


def _device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """A digest that is computed where the tensor lies: the sum of its elements, as integers, each by a weight.

    A place has a weight of its own. Every weight is odd, so that no change of a single element goes unseen. Elements of
    8 bytes count as two, because the highest bit of a sum of 64 bits would not tell two changes of sign from none.
    """
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.reshape(-1).view(_INTEGERS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(_PIECE, flat.numel()), dtype=torch.int64, device=flat.device)
    weights = (places * _FACTOR) | 1
    for number, start in enumerate(range(0, flat.numel(), _PIECE)):
        piece = flat[start : start + _PIECE]
        total = total * _FACTOR + (piece * weights[: piece.numel()]).sum() + number
    return total
