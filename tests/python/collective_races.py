"""Finds accesses of the tensors of collectives that nothing orders: stream_races.py for the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from poseidon.torch.backend import arrays, group, work
from poseidon.torch.tensors import devices
from stream_races import CORE, Machine, as_device, this_thread


class _Collectives:
    """The core's collectives, whose accesses to memory are noted. From its start to its wait one may write any time."""

    def __init__(self, collectives: Any, machine: Machine, lent: dict[int, tuple[Any, torch.Tensor]]) -> None:
        self._collectives, self._machine, self._lent = collectives, machine, lent
        self._written: dict[int, list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def start(self, communicator: int, kind: Any, inputs: Sequence[Any], outputs: Sequence[Any], **how: Any) -> int:
        written = self._begin(inputs, outputs)
        call = self._collectives.start(communicator, kind, inputs, outputs, **how)
        self._written[call] = written
        return int(call)

    def send(self, communicator: int, to: int, tag: int, label: int, memory: Any) -> int:
        self._begin([memory], [])
        return int(self._collectives.send(communicator, to, tag, label, memory))

    def receive(self, communicator: int, source: int | None, tag: int, label: int, memory: Any) -> int:
        written = self._begin([], [memory])
        call = self._collectives.receive(communicator, source, tag, label, memory)
        self._written[call] = written
        return int(call)

    def wait(self, call: int, limit_s: float | None) -> int | None:
        source: int | None = self._collectives.wait(call, limit_s)
        for tensor in self._written.pop(call, []):
            self._machine.access(CORE, tensor, True, f"the result of call {call}")
        self._machine.learn(this_thread(), self._machine.now(CORE))
        return source

    def _begin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[torch.Tensor]:
        self._machine.learn(CORE, self._machine.now(this_thread()))
        tensors = [
            [self._lent.pop(id(one))[1] for one in {id(one): one for one in some}.values()]
            for some in (inputs, outputs)
        ]
        for tensor in tensors[0]:
            self._machine.access(CORE, tensor, False, "a collective")
        for tensor in tensors[1]:
            self._machine.access(CORE, tensor, True, "a collective")
        return tensors[1]


def collective_races(function: Callable[..., Any], *args: Any) -> list[str]:
    """Runs `function(runtime, *args)` in the present world of torch.distributed, as if all its tensors were on a device
    whose runtime it gets. Returns the races."""
    machine = Machine()
    lent: dict[int, tuple[Any, torch.Tensor]] = {}
    borrowed = group.borrowed

    def lend(tensor: torch.Tensor) -> Any:
        memory = borrowed(tensor)
        lent[id(memory)] = memory, tensor
        return memory

    home = dist.group.WORLD.home  # type: ignore[union-attr]
    with as_device(machine) as runtime, ExitStack() as stack:
        for module, name, replacement in (
            (devices, "runtime_of", lambda device: runtime),
            (arrays, "is_accelerator", lambda device: True),
            (work, "is_accelerator", lambda device: True),
            (group, "borrowed", lend),
            (home, "collectives", _Collectives(home.collectives, machine, lent)),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        function(runtime, *args)
    assert machine.side_access_count > 0
    return machine.races
