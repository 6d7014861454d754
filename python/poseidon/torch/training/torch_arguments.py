"""The arguments of torch's `DistributedDataParallel`, as the caller passed them, and their meaning here."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel

from poseidon.errors import InvalidArgument

_PARAMETERS = inspect.signature(TorchDistributedDataParallel.__init__).parameters


def in_torchs_order(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates a constructor: arguments by position are in the order of the installed torch, which varies."""
    names = list(_PARAMETERS)[1:]

    @functools.wraps(init)
    def take(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise InvalidArgument(
                f"DistributedDataParallel takes {len(names)} arguments by position and got {len(args)}: pass the "
                "others by name"
            )
        init(self, **dict(zip(names, args, strict=False)), **kwargs)

    return take


def buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether rank 0's buffers reach all ranks in forward passes, and at the start.

    As torch's class reads its two arguments. Warns where that class does, from torch 2.13 on.
    """
    if broadcast_buffers is not None and "forward_sync_buffers" in _PARAMETERS:
        text = (
            "broadcast_buffers is deprecated by torch: use forward_sync_buffers, which leaves the start's sync as it is"
        )
        if forward_sync_buffers is not None:
            text = "broadcast_buffers is ignored, since forward_sync_buffers is given"
        warnings.warn(text, FutureWarning, stacklevel=4)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    sends = broadcast_buffers is None or bool(broadcast_buffers)
    return sends, sends


def check_unknown(arguments: dict[str, Any]) -> None:
    """InvalidArgument for arguments of a newer torch that are not at their defaults, and for what is no argument."""
    for name, value in arguments.items():
        theirs = _PARAMETERS.get(name)
        if theirs is None:
            raise InvalidArgument(f"DistributedDataParallel has no argument {name!r}: leave it out")
        if value is not theirs.default and value != theirs.default:
            raise InvalidArgument(
                f"{name}={value!r} is new in this version of torch and not known to Poseidon: leave it at "
                f"{theirs.default!r}"
            )


def check_mixed_precision(config: Any) -> None:
    """InvalidArgument unless the configuration changes nothing."""
    if config is None:
        return
    dtypes = [getattr(config, name, object()) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")]
    if any(dtype is not None for dtype in dtypes):
        raise InvalidArgument(
            f"mixed_precision={config!r} is not supported, since parameters stay in their own dtype here: compute "
            "under torch.autocast(device_type, dtype) instead"
        )


def check_delayed(named_params: Sequence[tuple[str, nn.Parameter]] | None, hooked: nn.Parameter | None) -> None:
    """InvalidArgument unless both arguments of a delayed all-reduce are given or none.

    Nothing has to be delayed here: these parameters are exchanged like all others, by urgency.
    """
    if (named_params is None) != (hooked is None):
        raise InvalidArgument(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: pass both, "
            "or leave both out"
        )


def choose_process_group(process_group: Any, device_mesh: Any) -> Any:
    """The group of torch.distributed that was asked for; None: the world."""
    if process_group is not None and device_mesh is not None:
        raise InvalidArgument(
            "Cannot specify both process_group and device_mesh arguments. Pass the one that names the ranks"
        )
    if device_mesh is None:
        if process_group is not None:
            from torch.distributed import ProcessGroup

            if not isinstance(process_group, ProcessGroup):
                raise InvalidArgument(
                    f"process_group is of type {type(process_group).__name__}, no group that this rank belongs to: "
                    "pass what torch.distributed.new_group() returned on one of the group's ranks, or leave it out"
                )
        return process_group
    if not hasattr(device_mesh, "get_group"):
        raise InvalidArgument(
            f"device_mesh is of type {type(device_mesh).__name__}: pass what init_device_mesh() returned, or "
            "leave it out"
        )
    if device_mesh.ndim != 1:
        raise InvalidArgument(
            f"Only 1D device mesh is supported, but got {device_mesh}: pass the slice over which the model is "
            "replicated, such as mesh['data']"
        )
    return device_mesh.get_group(mesh_dim=0)


def choose_devices(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> tuple[list[int] | None, int | None]:
    """The attributes `device_ids` and `output_device` of torch's class; None where inputs stay where they are."""
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise InvalidArgument(f"device_ids is {device_ids!r} and must be a list of one device: pass [{device_ids!r}]")
    if device_ids is not None and len(device_ids) > 1:
        raise InvalidArgument(
            f"device_ids is {list(device_ids)}: device_ids can only be None or contain a single element"
        )
    devices = {param.device for param in module.parameters()}
    if not device_ids or any(device.type == "cpu" for device in devices) or len(devices) > 1:
        if device_ids or output_device:
            raise InvalidArgument(
                f"device_ids is {device_ids}, output_device is {output_device}, and the parameters are on {devices}: "
                "device_ids and output_device arguments only work with a module on one GPU; leave both out"
            )
        return None, None
    index = torch._utils._get_device_index(device_ids[0], True)
    out = index if output_device is None else torch._utils._get_device_index(output_device, True)
    if {device.index for device in devices} != {index} or out != index:
        raise InvalidArgument(
            f"device_ids and output_device must name the module's device, {devices}, not {device_ids[0]} and "
            f"{output_device}"
        )
    return [index], out
