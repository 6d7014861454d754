"""The check that all ranks built the same model."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import poseidon
from poseidon.errors import Mismatch, PoseidonError
from poseidon.torch.control import Control
from poseidon.torch.layers import SyncedParameter


def describe(module: nn.Module, entries: list[SyncedParameter], options: str) -> str:
    """One line for everything that must be the same on all ranks."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    lines = [f"versions: poseidon {poseidon.__version__}, torch {torch_version}", f"options: {options}"]
    synced = {entry.param: entry for entry in entries}
    for name, param in module.named_parameters():
        entry = synced.get(param)
        how = "not synchronized" if entry is None else f"scheme {entry.scheme}{', factorable' * entry.factorable}"
        lines.append(f"parameter {name}: {_tensor(param)}, requires_grad {param.requires_grad}, {how}")
    lines += [f"buffer {name}: {_tensor(buffer)}" for name, buffer in module.named_buffers()]
    return "\n".join(lines)


def _tensor(tensor: torch.Tensor) -> str:
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape {tuple(tensor.shape)}, device {tensor.device.type}, dtype {dtype}, strides {strides}"


def check_same(control: Control, description: str, what: str) -> None:
    """Raises Mismatch on every rank, with the first difference, unless all ranks describe the same `what`."""
    texts = control.texts_if_different(description)
    if texts is None:
        return
    # So that nobody ends, which would be an error of its own, before all have the texts.
    with contextlib.suppress(PoseidonError):
        control.barrier()
    reference = texts[0].split("\n")
    for rank, text in enumerate(texts):
        lines = text.split("\n")
        for index in range(max(len(lines), len(reference))):
            theirs, ours = (part[index] if index < len(part) else "nothing more" for part in (lines, reference))
            if theirs != ours:
                raise Mismatch(
                    f"the ranks built different {what}s: rank 0 has {ours!r}, rank {rank} has {theirs!r}; "
                    f"build the {what} from the same code and options on every rank"
                )
