"""A model as text, so that the ranks can compare theirs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from poseidon.torch.model.parameters import SyncedParameter
from poseidon.version import VERSION


def describe(
    module: nn.Module, entries: list[SyncedParameter], options: str, ignored: Collection[str], buffers: bool = True
) -> str:
    """One line for everything that must be the same on all ranks; `ignored` names what need not be.

    `buffers`: buffers must be the same, too.
    """
    torch_version = ".".join(torch.__version__.split(".")[:2])
    lines = [f"versions: poseidon {VERSION}, torch {torch_version}", f"options: {options}"]
    synced = {entry.param: entry for entry in entries}
    for name, param in module.named_parameters():
        if name in ignored:
            continue
        entry = synced.get(param)
        how = "not synchronized" if entry is None else _exchange_of(entry)
        lines.append(f"parameter {name}: {_tensor(param)}, requires_grad {param.requires_grad}, {how}")
    found = module.named_buffers() if buffers else ()
    lines += [f"buffer {name}: {_tensor(buffer)}" for name, buffer in found if name not in ignored]
    return "\n".join(lines)


def _exchange_of(entry: SyncedParameter) -> str:
    asked = entry.asked
    factorable, sparse = ", factorable" * asked.factorable, ", sparse gradients" * entry.form.is_sparse
    sparse += ", rows or dense" * asked.zeros_are_missing
    numbers = f"topk_fraction={asked.topk_fraction}, powersgd_rank={asked.powersgd_rank}, rows={asked.matrix_rows}"
    lossy = f", lossy {asked.lossy} ({numbers})" if asked.may_lose else ""
    factors = f", factors {asked.factor_wire}" if asked.factor_wire else ""
    return f"scheme {asked.scheme}, wire {asked.wire}{factors}{lossy}{factorable}{sparse}"


def _tensor(tensor: torch.Tensor) -> str:
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape {tuple(tensor.shape)}, device {tensor.device.type}, dtype {dtype}, strides {strides}"
