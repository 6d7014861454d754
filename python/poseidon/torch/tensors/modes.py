"""The modes of PyTorch in which an update is made."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


def update_mode(device: torch.device) -> AbstractContextManager[Any]:
    """What step() usually runs in, whatever the surroundings of the forward pass that waits for an update are."""
    autocast = torch.is_autocast_enabled(device.type)
    if not autocast and not torch.is_inference_mode_enabled():
        return torch.no_grad()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))  # or the optimizer's state would be of a kind that stays as it is
    modes.enter_context(torch.no_grad())
    if autocast:
        modes.enter_context(torch.autocast(device.type, enabled=False))
    return modes
