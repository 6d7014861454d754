"""Finds accesses of a device's streams, the program, the mover thread and the core that nothing orders.

`DeviceCopies` runs for real, on CPU tensors that stand for the device's. Streams and events of its runtime are replaced
by objects that only keep vector clocks. Every operation that torch dispatches is an access of the current stream to
the memory of its arguments and results. Two accesses to the same bytes, of which one writes, are a race if the later
one does not know of the earlier one: then a GPU may make them in the other order, which a test on a GPU rarely shows.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import poseidon.torch.training.trained_model as trained_model
from poseidon.torch.exchange import mover
from poseidon.torch.exchange.mover import DeviceCopies, StagedTransfer

Time = dict[str, int]
"""By actor: the last of its accesses that is known."""

PROGRAM, CORE, MAIN = "program", "core", "main stream"


@dataclass(frozen=True)
class Access:
    """Of the bytes from `begin` to `end`. It is the `number`-th of its actor."""

    actor: str
    number: int
    begin: int
    end: int
    writes: bool
    what: str


class Machine:
    """A device and its host. Thread-safe."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.side_access_count = 0
        self.host_memory: set[int] = set()  # addresses of pinned memory
        self._current = threading.local()  # the stream of each thread
        self._times: dict[str, Time] = defaultdict(dict)
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by address of the storage
        self._kept: list[Any] = []  # an address is never used twice
        self._lock = threading.RLock()

    @property
    def stream(self) -> str:
        """The current stream of this thread."""
        return getattr(self._current, "stream", MAIN)

    @stream.setter
    def stream(self, name: str) -> None:
        self._current.stream = name

    def now(self, actor: str) -> Time:
        with self._lock:
            return dict(self._times[actor])

    def learn(self, actor: str, time: Time) -> None:
        """From now on the actor comes after all that was known then."""
        with self._lock:
            own = self._times[actor]
            for other, number in time.items():
                own[other] = max(own.get(other, 0), number)

    def access(self, actor: str, tensor: torch.Tensor, writes: bool, what: str) -> None:
        if tensor.numel() == 0 or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.itemsize
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        with self._lock:
            time = self._times[actor]
            time[actor] = time.get(actor, 0) + 1
            one = Access(actor, time[actor], begin, begin + length * tensor.itemsize, writes, what)
            self._kept.append(storage)
            before = self._accesses[storage.data_ptr()]
            for other in before:
                overlap = other.begin < one.end and one.begin < other.end and (other.writes or writes)
                if overlap and time.get(other.actor, 0) < other.number:
                    self.races.append(f"{what} on the {actor} is not ordered after {other.what} on the {other.actor}")
            before.append(one)

    def dispatched(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes what an operation has read and written."""
        name = str(function)
        written = {
            id(value)
            for argument, value in zip(function._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        } | {id(value) for key, value in kwargs.items() if key == "out"}
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        known = {value.untyped_storage().data_ptr() for value in given}
        made = [
            value
            for value in tree_leaves(result)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in known
        ]
        if not made and not written:
            return  # a view
        tensors = [*given, *made]
        on_host = all(value.untyped_storage().data_ptr() in self.host_memory for value in tensors)
        actor = PROGRAM if on_host else self.stream
        self.learn(actor, self.now(PROGRAM))
        self.side_access_count += actor not in (PROGRAM, MAIN)
        for value in given:
            self.access(actor, value, id(value) in written, name)
        for value in made:
            self.access(actor, value, True, name)


class _Dispatch(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._machine.dispatched(func, args, kwargs or {}, result)
        return result


class _Client:
    """The client, whose accesses to memory are noted. From its start to its wait an exchange may write at any time."""

    def __init__(self, client: Any, machine: Machine) -> None:
        self._client = client
        self._machine = machine
        self._writes: dict[int, list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _begin(self, layer: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        self._machine.learn(CORE, self._machine.now(this_thread()))
        for tensor in reads:
            self._machine.access(CORE, tensor, False, f"the exchange of layer {layer}")
        for tensor in writes:
            self._machine.access(CORE, tensor, True, f"the exchange of layer {layer}")
        self._writes[layer] = writes

    def start(self, layer: int, host: torch.Tensor, *rest: Any) -> None:
        self._begin(layer, [], [host])
        self._client.start(layer, host, *rest)

    def push_pull(self, layer: int, sent: torch.Tensor, received: torch.Tensor, *rest: Any) -> None:
        self._begin(layer, [sent], [received])
        self._client.push_pull(layer, sent, received, *rest)

    def start_absent(self, layer: int, host: torch.Tensor, *rest: Any) -> None:
        self._begin(layer, [], [host])
        self._client.start_absent(layer, host, *rest)

    def start_factors(self, layer: int, lefts: Any, rights: Any, destination: Any, *rest: Any) -> None:
        self._begin(layer, [*lefts, *rights], [] if destination is None else [destination])
        self._client.start_factors(layer, lefts, rights, destination, *rest)

    def wait(self, layer: int) -> None:
        self._client.wait(layer)
        for tensor in self._writes.pop(layer, []):
            self._machine.access(CORE, tensor, True, f"the result of layer {layer}")
        self._machine.learn(PROGRAM, self._machine.now(CORE))


def this_thread() -> str:
    """The actor whose code runs."""
    return PROGRAM if threading.current_thread() is threading.main_thread() else "mover"


def _runtime(machine: Machine) -> dict[str, Any]:
    """What stands for the names of a device's runtime, such as `torch.cuda`."""

    class Stream:
        def __init__(self, device: torch.device | None = None, name: str = "side stream") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            machine.learn(self.name, machine.now(other.name))

        def wait_event(self, event: Event) -> None:
            machine.learn(self.name, event.time)

    class Event:
        def record(self, stream: Stream) -> None:
            self.time = machine.now(stream.name)

        def synchronize(self) -> None:
            machine.learn(this_thread(), self.time)

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before, machine.stream = machine.stream, chosen.name
        try:
            yield
        finally:
            machine.stream = before

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: Stream(name=machine.stream),
    }


def races(copies: type[DeviceCopies], function: Callable[..., Any], *args: Any) -> tuple[list[str], int, Any]:
    """Runs `function` with all exchanges staged by `copies`. Returns the races, the number of operations on the side
    stream, and what the function has returned."""
    machine = Machine()

    def make(client: Any, device: torch.device) -> StagedTransfer:
        return StagedTransfer(_Client(client, machine), copies(device))  # type: ignore[arg-type]

    with as_device(machine) as runtime, ExitStack() as stack:
        stack.enter_context(mock.patch.object(mover, "runtime_of", return_value=runtime))
        stack.enter_context(mock.patch.object(trained_model, "make_transfer", make))
        result = function(*args)
    return machine.races, machine.side_access_count, result


@contextmanager
def as_device(machine: Machine) -> Iterator[Any]:
    """Notes what torch does on this thread. Gives what stands for the device's runtime."""
    empty = torch.empty

    def pinned(*sizes: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*sizes, **kwargs)
        with _disable_current_modes():  # no stream makes it
            tensor = empty(*sizes, **kwargs)
        machine.host_memory.add(tensor.untyped_storage().data_ptr())
        return tensor

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "empty", pinned))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", return_value=None))
        stack.enter_context(_Dispatch(machine))
        yield SimpleNamespace(**_runtime(machine))
