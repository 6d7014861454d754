"""Exchanges tensors on a device, with copies from and to host memory during the computation.

A gradient is copied to host memory on a side stream. A mover thread waits for the copy and starts the exchange, so
backward never waits. The core only gathers factors. The device multiplies them, on every rank with the same product of
the same rows in rank order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon import _core
from poseidon.schemes import workers_multiply
from poseidon.torch.exchange.transfer import Rows, Transfer
from poseidon.torch.model.factors import Factors
from poseidon.torch.tensors.devices import check_no_capture, is_accelerator, runtime_of
from poseidon.torch.tensors.memory import flat_view


class DeviceCopies:
    """Copies between one accelerator and pinned host memory, on a side stream. Used with the GIL held."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runtime = runtime_of(device)
        self._stream = self._runtime.Stream(device)
        self._backward: Any = None  # the stream of the last gradient

    def host_buffer(self, element_count: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D host memory, fit for asynchronous copies."""
        return torch.empty(element_count, dtype=dtype, pin_memory=True)

    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        """Starts a copy of a dense tensor once the work submitted so far has produced it.

        Returns a function that waits for it. Raises InvalidArgument while a CUDA graph is captured.
        """
        check_no_capture(self._runtime)
        self._backward = self._runtime.current_stream(self.device)
        self._stream.wait_stream(self._backward)
        copied = self._runtime.Event()
        with self._runtime.stream(self._stream):
            host.copy_(flat_view(source), non_blocking=True)
            source.record_stream(self._stream)
            copied.record(self._stream)
        return copied.synchronize

    def to_device(self, host: torch.Tensor, destination: torch.Tensor) -> None:
        """Starts a copy into a dense tensor once the work submitted so far no longer needs what it holds."""
        self._stream.wait_stream(self._runtime.current_stream(self.device))
        with self._runtime.stream(self._stream):
            flat_view(destination).copy_(host, non_blocking=True)
            destination.record_stream(self._stream)

    def run(self, function: Callable[[], None]) -> None:
        """Submits device work after the copies."""
        with self._runtime.stream(self._stream):
            function()

    def join(self) -> None:
        """Makes the computation submitted from now on wait for all copies and work: on this stream, and on backward's.

        What is waited for in a part of forward that has a stream of its own may be used by the rest, too.
        """
        for stream in (self._runtime.current_stream(self.device), self._backward):
            if stream is not None:
                stream.wait_stream(self._stream)


@dataclass(eq=False)
class _Staged:
    """One layer's transfer."""

    divisor: int
    buffer: torch.Tensor | None  # what receives the result; None: `result_rows` reads it
    host: torch.Tensor | None  # what it is received into before; None: it is made of the gathered parts
    sent: Sequence[torch.Tensor] = ()  # gathered parts may lie there until the result is made
    started: threading.Event = field(default_factory=threading.Event)  # or never will be, because of an error


class StagedTransfer(Transfer):
    """The transfer of device tensors through host memory."""

    def __init__(self, client: _core.Client, copies: DeviceCopies) -> None:
        super().__init__(client)
        self._copies = copies
        self._hosts: dict[int, torch.Tensor] = {}
        # Parameters as servers have sent them last: what comes next travels as the difference.
        self._received: dict[int, torch.Tensor] = {}
        self._staged: dict[int, _Staged] = {}  # by layer
        self._starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=_move, args=(self._starts,), name="poseidon mover", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        self._starts.put(None)

    def dense(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, factor_count: int | None) -> None:
        host = self._host(layer, buffer)
        start = partial(self._client.start, layer, host, divisor, factor_count)
        self._stage(layer, self._receiving(layer, buffer, divisor, scheme), [self._copies.to_host(buffer, host)], start)

    def absent(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, counts: bool = True) -> None:
        start = partial(self._client.start_absent, layer, self._host(layer, buffer), divisor, counts)
        self._stage(layer, self._receiving(layer, buffer, divisor, scheme), [], start)

    def factors(self, layer: int, factors: Factors, buffer: torch.Tensor, divisor: int, scheme: str) -> None:
        hosts, copied = self._send((*factors.lefts, *factors.rights))
        staged, count = self._receiving(layer, buffer, divisor, scheme), len(factors.lefts)
        staged.sent = hosts
        start = partial(self._client.start_factors, layer, hosts[:count], hosts[count:], staged.host, divisor)
        self._stage(layer, staged, copied, start)

    def rows(self, layer: int, rows: Rows | None, divisor: int, counts: bool = True) -> None:
        hosts, copied = self._send(rows or ())
        start = partial(super().rows, layer, None if rows is None else (hosts[0], hosts[1]), divisor, counts)
        self._stage(layer, _Staged(divisor, None, None), copied, start)

    def result_rows(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        indices, values = super().result_rows(layer, like)
        found = None if indices is None else self._on_device(indices), self._on_device(values)
        self._copies.join()
        return found

    def update(self, layer: int, gradient: torch.Tensor, parameter: torch.Tensor, divisor: int) -> None:
        sent, received = self._host(layer, gradient), self._host(layer, parameter, self._received)
        start = partial(self._client.push_pull, layer, sent, received, divisor)
        self._stage(layer, _Staged(divisor, parameter, received), [self._copies.to_host(gradient, sent)], start)

    def _host(self, layer: int, buffer: torch.Tensor, hosts: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        hosts = self._hosts if hosts is None else hosts
        if layer not in hosts:
            hosts[layer] = self._copies.host_buffer(buffer.numel(), buffer.dtype)
        return hosts[layer]

    def _receiving(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str) -> _Staged:
        return _Staged(divisor, buffer, None if workers_multiply(scheme) else self._host(layer, buffer))

    def _send(self, parts: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Callable[[], None]]]:
        """What these become in host memory, and what waits for the copy of each."""
        hosts = [self._copies.host_buffer(part.numel(), part.dtype) for part in parts]
        copied = [self._copies.to_host(part, host) for part, host in zip(parts, hosts, strict=True)]
        return [host.view(part.shape) for part, host in zip(parts, hosts, strict=True)], copied

    def _stage(
        self, layer: int, staged: _Staged, copied: Sequence[Callable[[], None]], start: Callable[[], object]
    ) -> None:
        self._staged[layer] = staged

        def move() -> None:
            try:
                if self._error is None:
                    for wait in copied:
                        wait()
                    start()
            except BaseException as error:
                self._error = error
            finally:
                staged.started.set()

        self._starts.put(move)

    def wait(self, layers: Sequence[int]) -> None:
        for layer in layers:
            staged = self._staged.pop(layer)
            staged.started.wait()
            if self._error is not None:
                raise self._error
            self._client.wait(layer)
            if staged.buffer is None or not self._client.layer_stats(layer).present:
                continue
            if staged.host is None:
                self._multiply(layer, staged.buffer, staged.divisor)
            else:
                self._copies.to_device(staged.host, staged.buffer)
        self._copies.join()

    def done(self, layer: int) -> bool:
        return self._staged[layer].started.is_set() and super().done(layer)

    def _multiply(self, layer: int, buffer: torch.Tensor, divisor: int) -> None:
        """Makes the mean of the gathered parts on the device: one product in rank order, then dense parts."""
        rows, cols = buffer.shape
        dtype = buffer.dtype
        lefts, rights, denses = [], [], []
        for part in self._client.gathered(layer):
            if part is None:
                continue
            own_dtype, own = getattr(torch, part[0]), part[1]  # rounded parts have another dtype than the layer
            if isinstance(own, list):
                lefts += [self._upload(left, own_dtype, rows) for left, _ in own]
                rights += [self._upload(right, own_dtype, cols) for _, right in own]
            else:
                denses.append(self._upload(own, own_dtype, cols))

        def product() -> None:
            if lefts:
                torch.mm(torch.cat(lefts).to(dtype).t(), torch.cat(rights).to(dtype), out=buffer)
            else:
                buffer.zero_()
            for dense in denses:
                buffer.add_(dense)
            buffer.div_(divisor)

        self._copies.run(product)

    def _on_device(self, part: torch.Tensor) -> torch.Tensor:
        host = self._copies.host_buffer(part.numel(), part.dtype).copy_(part.view(-1))
        copy = torch.empty(part.shape, dtype=part.dtype, device=self._copies.device)
        self._copies.to_device(host, copy)
        return copy

    def _upload(self, raw: NDArray[np.uint8], dtype: torch.dtype, width: int) -> torch.Tensor:
        """Rows that the core holds as bytes, as a matrix on the device."""
        host = self._copies.host_buffer(raw.size // dtype.itemsize, dtype)
        host.view(torch.uint8).numpy()[:] = raw
        matrix = torch.empty(host.numel() // width, width, dtype=dtype, device=self._copies.device)
        self._copies.to_device(host, matrix)
        return matrix


def _move(starts: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """The mover thread: starts exchanges in order as their copies complete."""
    while True:
        start = starts.get()
        if start is None:
            return
        start()
        del start  # or it would keep the exchange alive until the next one


def make_transfer(client: _core.Client, device: torch.device) -> Transfer:
    """The transfer for parameters on `device`."""
    return StagedTransfer(client, DeviceCopies(device)) if is_accelerator(device) else Transfer(client)
