"""Accelerators by the interface that torch has for all of them: CUDA, ROCm, XPU."""

from __future__ import annotations

from typing import Any

import torch

from poseidon.errors import InvalidArgument


def is_accelerator(device: torch.device) -> bool:
    """Whether its work has streams of its own, and its memory is not the host's."""
    return device.type != "cpu"


def runtime_of(device: torch.device) -> Any:
    """Returns what torch has for this kind of device: torch.cuda, which ROCm has, too, torch.xpu and the like."""
    return getattr(torch, device.type)


def runtimes_in_use() -> list[Any]:
    """Those of the accelerators that this process has used."""
    runtimes = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return [runtime for runtime in runtimes if runtime and runtime.is_available() and runtime.is_initialized()]


def check_no_capture(runtime: Any) -> None:
    """Raises InvalidArgument while the current stream is captured into a graph, which no exchange can be a part of."""
    capturing = getattr(runtime, "is_current_stream_capturing", None)
    if capturing is not None and capturing():
        raise InvalidArgument("an exchange cannot be a part of a CUDA graph: run backward outside the capture")


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for the elements of a device's tensor, fit for asynchronous copies. It has any content."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor on a device, as the work submitted to its current stream so far leaves them.

    Waits for that work. Raises InvalidArgument while a CUDA graph is captured.
    """
    check_no_capture(runtime_of(tensor.device))
    host = pinned(tensor)
    host.copy_(tensor, non_blocking=True)
    Submitted(tensor.device).wait()
    return host


class Submitted:
    """The work that a device's current stream, the calling thread's, has been given until now."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._runtime = device, runtime_of(device)
        self._event = self._runtime.Event()
        self._event.record(self._runtime.current_stream(device))

    def wait(self) -> None:
        """Returns when it is done."""
        self._event.synchronize()

    def order(self) -> None:
        """What is submitted to the current stream from now on comes after it."""
        self._runtime.current_stream(self._device).wait_event(self._event)


def to_device(host: torch.Tensor, tensor: torch.Tensor, before: Submitted) -> None:
    """Starts a copy from pinned memory to a device's tensor, on the current stream, after `before`."""
    before.order()
    tensor.copy_(host, non_blocking=True)
    tensor.record_stream(runtime_of(tensor.device).current_stream(tensor.device))
