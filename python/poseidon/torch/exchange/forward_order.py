"""A forward pass of a model whose parameters are updated while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from poseidon.torch.adapter.priorities import Priorities
    from poseidon.torch.exchange.synchronizer import Synchronizer


@contextmanager
def forward_order(module: nn.Module, sync: Synchronizer, priorities: Priorities) -> Iterator[None]:
    """Around the module's forward: settles what it cannot wait for by itself, and records the order of uses."""
    if not torch.is_grad_enabled():
        with sync.evaluation():  # there is nothing to overlap with
            yield
        return
    opaque = opaque_parameters(module)
    if not opaque:
        sync.overtake(by_forward=True)
        with priorities.recording(sync):
            yield
        return
    sync.make_ready(entry for entry in sync.entries if entry.param in opaque)
    sync.overtake(by_forward=True)
    yield


def opaque_parameters(module: nn.Module) -> set[torch.Tensor]:
    """Those of modules that run compiled (torch.compile, torch.jit), where a use of a parameter is not seen."""
    return {
        param
        for part in module.modules()
        if "_orig_mod" in part._modules or part._compiled_call_impl is not None or _is_scripted(part)
        for param in part.parameters()
    }


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
