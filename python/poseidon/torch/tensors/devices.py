"""Accelerators by the interface that torch has for all of them: CUDA, ROCm, XPU."""

from __future__ import annotations

from typing import Any

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether its work has streams of its own, and its memory is not the host's."""
    return device.type != "cpu"


def runtime_of(device: torch.device) -> Any:
    """Returns what torch has for this kind of device: torch.cuda, which ROCm has, too, torch.xpu and the like."""
    return getattr(torch, device.type)
