"""The modes of PyTorch in which an update is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


def update_mode(device: torch.device) -> AbstractContextManager[Any]:
    """What step() usually runs in, whatever the surroundings of the forward pass that waits for an update are."""
    autocast = torch.is_autocast_enabled(device.type)
    compiling = torch.compiler.is_compiling()
    if not autocast and not compiling and not torch.is_inference_mode_enabled():
        return torch.no_grad()
    modes = ExitStack()
    if compiling:
        modes.enter_context(_not_compiling())
    modes.enter_context(torch.inference_mode(False))  # or the optimizer's state would be of a kind that stays as it is
    modes.enter_context(torch.no_grad())
    if autocast:
        modes.enter_context(torch.autocast(device.type, enabled=False))
    return modes


@contextmanager
def _not_compiling() -> Iterator[None]:
    """Within torch's callback before it compiles, optimizers would take other kernels, which round otherwise."""
    flags: Any = torch.compiler
    flags._is_compiling_flag = False
    try:
        yield
    finally:
        flags._is_compiling_flag = True
