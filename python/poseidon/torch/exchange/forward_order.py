"""A forward pass of a model whose parameters are updated while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from poseidon.adapter.priorities import Priorities
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.watched import watch


@contextmanager
def forward_order(
    module: nn.Module, flights: Flights, entries: Sequence[SyncedParameter], priorities: Priorities
) -> Iterator[None]:
    """Around the module's forward: settles what it cannot wait for by itself, and records the order of uses."""
    if not torch.is_grad_enabled():
        with flights.evaluation():  # there is nothing to overlap with
            yield
        return
    opaque = opaque_parameters(module)
    if not opaque:
        flights.overtake(by_forward=True)
        with _recording(flights, entries, priorities):
            yield
        return
    flights.make_ready(entry for entry in entries if entry.param in opaque)
    flights.overtake(by_forward=True)
    yield


@contextmanager
def _recording(flights: Flights, entries: Sequence[SyncedParameter], priorities: Priorities) -> Iterator[None]:
    """Around a forward pass that perhaps gives the order: its uses of parameters are watched then."""
    if not priorities.begin_recording():
        yield
        return
    for entry in entries:
        watch(entry.param, flights, entry)
    ended_well = False
    try:
        yield
        ended_well = True
    finally:
        priorities.end_recording(ended_well)
        for entry in entries:
            flights.release(entry)


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
