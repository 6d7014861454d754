"""Which parameters of a module are synchronized, and which schemes and wire formats the user wants for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from poseidon.adapter.layer import LossyChoice, SchemeChoice, WireChoice
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.wishes import Wishes
from poseidon.errors import InvalidArgument
from poseidon.options import BY_NAME, Settings
from poseidon.schemes import SCHEME_CHOICES
from poseidon.torch.model.cut_linear import gives_factors
from poseidon.torch.model.factors import computes_plainly
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.model.sharded_parameter import ShardedParameter
from poseidon.torch.model.shards import LocalShards
from poseidon.torch.tensors.memory import DTYPE_NAMES
from poseidon.torch.tensors.shard import Shard
from poseidon.version import VERSION


def collect_parameters(
    module: nn.Module,
    scheme: SchemeChoice | None,
    wire: WireChoice | None,
    settings: Settings,
    ignored: Collection[str],
    lossy: LossyChoice | None = None,
) -> list[SyncedParameter]:
    """The parameters to synchronize, in registration order, tied ones once.

    Without a `scheme`, `wire` or `lossy` the settings' are taken. Raises InvalidArgument naming the parameter or module
    that cannot be synchronized.
    """
    owners = _owners(module.whole if isinstance(module, LocalShards) else module)
    alike: dict[tuple[nn.Module, ...], tuple[nn.Module, ...]] = {}  # the modules of most parameters are those of others
    schemes = Wishes("scheme", SCHEME_CHOICES, scheme, settings.scheme)
    formats = Wishes("wire format", BY_NAME["wire"].choices, wire, settings.wire)
    allowances = Wishes("choice of lossy", BY_NAME["lossy"].choices, lossy, settings.lossy)
    wishes_of = cache(partial(LayerWishes, **_wishes_for_all(settings, wire)))  # most parameters' are the same
    rules = LayerRules.of(settings)
    entries = []
    for name, param in module.named_parameters():
        # Choosing also for frozen ones lets a pattern that names only these pass.
        own = owners[param.whole if isinstance(param, Shard) else param]
        names = [full for _, _, full in own]
        wishes = wishes_of(schemes.of(names), formats.of(names), lossy=allowances.of(names))
        if not param.requires_grad or name in ignored or param.numel() == 0:
            continue
        linears = _capturing_linears(param, own)
        facts = facts_of(name, param, bool(linears), _rows_of(param, own))
        modules = tuple(part for part, _, _ in own)
        modules = alike.setdefault(modules, modules)
        kind = ShardedParameter if isinstance(param, Shard) else SyncedParameter
        entries.append(kind(param, facts, wishes, rules, modules, linears))
    for one in (schemes, formats, allowances):
        one.check_used()
    return entries


def _wishes_for_all(settings: Settings, wire: WireChoice | None) -> dict[str, Any]:
    """The wishes for which there are no patterns."""
    return {
        "wire_is_given": wire is not None or settings.sources.get("wire", "default") != "default",
        **LayerWishes.for_all(settings),
    }


def facts_of(name: str, param: torch.Tensor, gives_factors: bool = False, gives_rows: str = "") -> LayerFacts:
    """What is known of a parameter. Raises InvalidArgument if its numbers cannot be exchanged."""
    dtype = param.dtype.to_real()
    if dtype not in DTYPE_NAMES:
        raise InvalidArgument(
            f"parameter {name} has dtype {param.dtype}, which cannot be synchronized (only "
            f"{', '.join(DTYPE_NAMES.values())} and complex numbers of these can): convert it, or set "
            "requires_grad=False"
        )
    return LayerFacts(
        name,
        DTYPE_NAMES[dtype],
        param.numel() * (2 if param.is_complex() else 1),
        param.shape[0] if param.dim() > 1 else 0,
        gives_factors,
        gives_rows,
        who=f"parameter {name}",
        dtype_text=str(param.dtype),
    )


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _rows_of(param: nn.Parameter, owners: list[_Owner]) -> str:
    """How the gradient may come as rows: it is sparse, or a dense one of embeddings alone, or it may not."""
    if any(isinstance(part, _EMBEDDINGS) and part.sparse for part, _, _ in owners):
        return "sparse"
    return "zeros" if _is_table(param, owners) else ""


_Owner = tuple[nn.Module, str, str]  # module, attribute, full name


def _owners(module: nn.Module) -> dict[nn.Parameter, list[_Owner]]:
    owners: dict[nn.Parameter, list[_Owner]] = {}
    for prefix, part in module.named_modules():
        for attribute, param in part._parameters.items():
            if param is not None:
                full = f"{prefix}.{attribute}" if prefix else attribute
                owners.setdefault(param, []).append((part, attribute, full))
    return owners


def _is_table(param: nn.Parameter, owners: list[_Owner]) -> bool:
    """Whether `param` is the weight of embeddings, and of no other module, whose dense gradients may have few rows."""
    fits = param.dim() == 2 and param.is_contiguous() and not param.is_complex()
    return fits and all(isinstance(part, _EMBEDDINGS) and attribute == "weight" for part, attribute, _ in owners)


def _capturing_linears(param: nn.Parameter, owners: list[_Owner]) -> Sequence[nn.Linear]:
    """The Linear modules whose weight `param` is, if all its owners are such; else none."""
    if isinstance(param, Shard) and not gives_factors(param):
        return ()
    linears = [
        part
        for part, attribute, _ in owners
        if isinstance(part, nn.Linear) and attribute == "weight" and _is_plain_linear(part)
    ]
    fits = len(linears) == len(owners) and param.dim() == 2 and param.is_contiguous() and not param.is_complex()
    return linears if fits else ()


def _is_plain_linear(module: nn.Linear) -> bool:
    return (
        computes_plainly(module)
        # MultiheadAttention reads the weight of this one without calling it.
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    )


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
    lines += [module.describe()] if isinstance(module, LocalShards) else []
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
