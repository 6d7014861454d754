"""`ModelBuffers`: a module's buffers, which rank 0 gives all ranks before every forward pass."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from poseidon.adapter.agreed_arrays import AgreedArrays
from poseidon.adapter.agreement import check_same
from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument
from poseidon.torch.tensors.compatibility import preserved_versions
from poseidon.torch.tensors.memory import byte_view

_LEAVE_OUT = (
    "put its name into module._ddp_params_and_buffers_to_ignore on every rank, or pass broadcast_buffers=False and "
    "init_sync=False"
)
_ADVICE = (
    "register the same buffers on every rank, best before the model is wrapped; for buffers that are each rank's own "
    "put their names into module._ddp_params_and_buffers_to_ignore, or pass broadcast_buffers=False"
)


class ModelBuffers:
    """The buffers of a module but for those that are ignored."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module, self._ignored = module, ignored
        self._agreed = AgreedArrays("buffer", _ADVICE)
        self._control: Control | None = None
        self._checked: list[tuple[str, torch.Size, torch.dtype]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers by name."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def check(self) -> None:
        """Raises InvalidArgument, naming the buffer, for one that cannot be sent."""
        for name, buffer in self.tensors().items():
            _check_buffer(name, buffer)

    def connect(self, control: Control) -> None:
        """Collective: all ranks of `control` have the same buffers, as they have found."""
        self._control = control
        found = self.tensors()
        self._checked = _kinds(found)
        self._agreed.connect(control, self._checked, [buffer.nbytes for buffer in found.values()])

    def broadcast(self, control: Control, root: int, root_waits: bool) -> None:
        """Collective: overwrites the buffers with those of `root`, unseen by backward passes still to come.

        Raises Mismatch, naming a buffer, on a rank that has other buffers than `root`.
        """
        found = self.tensors()
        kinds = _kinds(found)
        if not kinds and not self._checked:
            return
        if self._control is not control:  # the program has just decided that they are sent
            self.check()
            check_same(control, "\n".join(map(str, kinds)), "list of buffer")
            self.connect(control)
        if kinds != self._checked:
            self.check()
            self._checked = kinds
        buffers = list(found.values())
        counted = [buffer for buffer in buffers if not buffer.is_inference()]
        with preserved_versions(counted):
            self._agreed.broadcast(kinds, buffers, root, root_waits)


def _kinds(buffers: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, buffer.shape, buffer.dtype) for name, buffer in buffers.items()]


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    what = ""
    if is_lazy(buffer):
        raise InvalidArgument(
            f"buffer {name} is uninitialized, as in lazy modules: run the module on a batch before wrapping it"
        )
    if buffer.is_meta:
        what = "on the meta device, where it has no values"
    elif buffer.layout != torch.strided:
        what = f"of layout {buffer.layout}"
    elif buffer.is_quantized:
        what = "quantized"
    elif buffer.is_nested or is_traceable_wrapper_subclass(buffer):
        what = f"a {type(buffer).__name__}"
    else:
        with suppress(RuntimeError, NotImplementedError, TypeError):
            byte_view(buffer[:0] if buffer.dim() else buffer)
            return
        what = f"of dtype {buffer.dtype}"
    raise InvalidArgument(f"buffer {name} is {what}, and cannot be sent to other ranks: {_LEAVE_OUT}")
