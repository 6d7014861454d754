"""The check that all ranks built the same model."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from itertools import zip_longest

import torch
from torch import nn

from poseidon.errors import Mismatch, PoseidonError
from poseidon.torch.adapter.control import Control
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.version import VERSION


def describe(module: nn.Module, entries: list[SyncedParameter], options: str, ignored: Collection[str]) -> str:
    """One line for everything that must be the same on all ranks; `ignored` names what need not be."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    lines = [f"versions: poseidon {VERSION}, torch {torch_version}", f"options: {options}"]
    synced = {entry.param: entry for entry in entries}
    for name, param in module.named_parameters():
        if name in ignored:
            continue
        entry = synced.get(param)
        how = "not synchronized" if entry is None else _exchange_of(entry)
        lines.append(f"parameter {name}: {_tensor(param)}, requires_grad {param.requires_grad}, {how}")
    lines += [f"buffer {name}: {_tensor(buffer)}" for name, buffer in module.named_buffers() if name not in ignored]
    return "\n".join(lines)


def _exchange_of(entry: SyncedParameter) -> str:
    return f"scheme {entry.scheme}{', factorable' * entry.factorable}{', sparse gradients' * entry.form.is_sparse}"


def _tensor(tensor: torch.Tensor) -> str:
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"shape {tuple(tensor.shape)}, device {tensor.device.type}, dtype {dtype}, strides {strides}"


def check_same(control: Control, description: str, what: str) -> None:
    """Raises Mismatch on every rank, with the first difference, unless all ranks describe the same `what`."""
    difference = first_difference(control, description)
    if difference is not None:
        rank, theirs, ours = difference
        raise Mismatch(
            f"the ranks built different {what}s: rank 0 has {ours!r}, rank {rank} has {theirs!r}; "
            f"build the {what} from the same code and options on every rank"
        )


def first_difference(control: Control, text: str) -> tuple[int, str, str] | None:
    """Collective. The first rank whose text is not rank 0's, its first line that differs, and rank 0's; or None."""
    texts = control.texts_if_different(text)
    if texts is None:
        return None
    # So that nobody ends, which would be an error of its own, before all have the texts.
    with contextlib.suppress(PoseidonError):
        control.barrier()
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    pairs = zip_longest(texts[rank].split("\n"), texts[0].split("\n"), fillvalue="nothing more")
    theirs, ours = next((theirs, ours) for theirs, ours in pairs if theirs != ours)
    return rank, theirs, ours
