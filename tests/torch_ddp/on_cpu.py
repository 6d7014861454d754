"""Makes PyTorch's own tests of DistributedDataParallel run on the CPU: whatever names a GPU means the CPU then.

`load(world_size)` patches PyTorch in this process and returns its module of tests, which nothing here copies.
Only for a process that runs nothing else.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

_FACTORIES = ("empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
_PIXELS = 40


def load(world_size: int, timeout_s: float) -> ModuleType:
    """torch.testing._internal.distributed.distributed_test, for gloo and that many processes of each test."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(timeout_s)),
    )
    sys.argv = sys.argv[:1]  # PyTorch's helpers read options of their own from it
    _lift_skips()
    tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    _put_tensors_on_cpu()
    _put_modules_on_cpu()
    _silence_cuda()
    return tests


def ignore_devices(kind: type[nn.Module]) -> None:
    """Lets `kind`, DistributedDataParallel of ours or theirs, take device_ids for a module on the CPU."""
    init = kind.__init__

    @functools.wraps(init)
    def __init__(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **rest: Any) -> None:
        init(self, module, **rest)

    kind.__init__ = __init__  # type: ignore[method-assign]


def _cpu(device: Any) -> Any:
    """`device`, or the CPU where it names a GPU."""
    is_gpu = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = is_gpu or (str(device).startswith("cuda") and isinstance(device, str | torch.device))
    return torch.device("cpu") if is_gpu else device


def _devices_replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(self, device, ...)` or with `device=`, on the CPU."""

    @functools.wraps(function)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(self, *(_cpu(argument) for argument in args), **kwargs)

    return on_cpu


def _device_keyword_replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return function(*args, **kwargs)

    return on_cpu


def _small_images(ones: Callable[..., Any]) -> Callable[..., Any]:
    """Images of 1000 by 1000 pixels take minutes without a GPU."""

    @functools.wraps(ones)
    def on_cpu(*sizes: Any, **kwargs: Any) -> Any:
        return ones(*(min(size, _PIXELS) for size in sizes), **kwargs) if len(sizes) == 4 else ones(*sizes, **kwargs)

    return on_cpu


def _put_tensors_on_cpu() -> None:
    torch.Tensor.to = _devices_replaced(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in _FACTORIES:
        setattr(torch, name, _device_keyword_replaced(getattr(torch, name)))
    torch.ones = _small_images(torch.ones)


def _put_modules_on_cpu() -> None:
    nn.Module.to = _devices_replaced(nn.Module.to)
    nn.Module.cuda = lambda self, *_, **__: self


def _silence_cuda() -> None:
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)  # one each: dynamo wants to tell them apart
    torch.cuda.current_device = lambda: torch.device("cpu")
    mesh = importlib.import_module("torch.distributed.device_mesh")
    make_mesh = mesh.init_device_mesh
    mesh.init_device_mesh = lambda _, *args, **kwargs: make_mesh("cpu", *args, **kwargs)


def _lift_skips() -> None:
    """No test asks for GPUs or for more time; each rank has one number of a device, its own."""
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.TIMEOUT_OVERRIDE.clear()
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common.nccl_skip_if_lt_x_gpu = lambda *_: lambda test: test
    common.skip_if_no_gpu = lambda test: test
    common.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}
