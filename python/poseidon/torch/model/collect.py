"""Which parameters of a module are synchronized, and which schemes and wire formats the user wants for them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import nn

from poseidon.adapter.layer import Compression, LossyChoice, SchemeChoice, WireChoice
from poseidon.adapter.wishes import Wishes
from poseidon.errors import InvalidArgument
from poseidon.options import BY_NAME, Settings
from poseidon.schemes import SCHEME_CHOICES, SCHEMES, is_lossy, takes_factors, takes_rows
from poseidon.torch.model.factors import computes_plainly
from poseidon.torch.model.gradient_form import form_of
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.memory import DTYPE_NAMES


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
    owners = _owners(module)
    alike: dict[tuple[nn.Module, ...], tuple[nn.Module, ...]] = {}  # the modules of most parameters are those of others
    schemes = Wishes("scheme", SCHEME_CHOICES, scheme, settings.scheme)
    formats = Wishes("wire format", BY_NAME["wire"].choices, wire, settings.wire)
    allowances = Wishes("choice of lossy", BY_NAME["lossy"].choices, lossy, settings.lossy)
    wire_is_given = wire is not None or settings.sources.get("wire", "default") != "default"
    entries = []
    for name, param in module.named_parameters():
        # Choosing also for frozen ones lets a pattern that names only these pass.
        own = owners[param]
        names = [full for _, _, full in own]
        wanted, wanted_format, allowed = schemes.of(names), formats.of(names), allowances.of(names)
        if not param.requires_grad or name in ignored or param.numel() == 0:
            continue
        sparse = any(_makes_sparse(part) for part, _, _ in own)
        if sparse and is_lossy(wanted):
            wanted = "auto"  # its rows are few already
        by_rows = _may_send_rows(param, own, wanted, allowed, settings)
        form = form_of(param, sparse, by_rows)
        if form.layout.dtype not in DTYPE_NAMES:
            raise InvalidArgument(
                f"parameter {name} has dtype {param.dtype}, which cannot be synchronized (only "
                f"{', '.join(DTYPE_NAMES.values())} and complex numbers of these can): convert it, or set "
                "requires_grad=False"
            )
        linears = _capturing_linears(param, own)
        if not linears and wanted != "auto" and not is_lossy(wanted) and not by_rows:
            wanted = "ps"
        if wanted != "auto" or sparse or form.layout.dtype != torch.float32:
            allowed = ""  # it is for float32 gradients whose scheme is open
        if allowed in formats.known and not wire_is_given:
            wanted_format = allowed
        check_wire(name, param, wanted, wanted_format)
        _check_lossy(name, param, wanted)
        feedback = settings.error_feedback == "on" and not sparse
        rows = param.shape[0] if param.dim() > 1 and not sparse else 0  # a sparse one counts more than its elements
        allowed = _allowed_scheme(name, allowed, wanted_format)
        factor_wire = ""
        if linears and settings.factor_wire != "wire" and (wanted == "auto" or takes_factors(wanted)):
            factor_wire = settings.factor_wire
            check_wire(name, param, wanted, factor_wire, "factor_wire")
        compression = _compression(allowed, settings.topk_fraction, settings.powersgd_rank, rows, factor_wire, feedback)
        modules = tuple(part for part, _, _ in own)
        modules = alike.setdefault(modules, modules)
        entries.append(SyncedParameter(name, param, form, wanted, wanted_format, modules, linears, compression))
    for wishes in (schemes, formats, allowances):
        wishes.check_used()
    return entries


def _check_lossy(name: str, param: nn.Parameter, scheme: str) -> None:
    """InvalidArgument if the gradient cannot take this scheme because it is lossy."""
    if is_lossy(scheme) and param.dtype not in (torch.float32, torch.complex64):
        raise InvalidArgument(
            f"parameter {name} has dtype {param.dtype} and scheme {scheme}, which takes float32 gradients: use scheme "
            "ps for it"
        )


def _allowed_scheme(name: str, allowed: str, wire: str) -> str:
    """The lossy scheme that is allowed, if any; InvalidArgument if it does not go with the wire format."""
    if is_lossy(allowed) and wire != "fp32":
        raise InvalidArgument(
            f"parameter {name} has lossy {allowed}, which sends numbers as they are, and wire {wire}: leave one of the "
            "two out"
        )
    return allowed if is_lossy(allowed) else ""


def check_wire(name: str, param: nn.Parameter, scheme: str, wire: str, option: str = "wire") -> None:
    """InvalidArgument, naming the parameter, if its gradients cannot travel in the wire format of this option."""
    # The core refuses this, too, but only rank by rank.
    if wire == "fp32":
        return
    if param.dtype in (torch.float64, torch.complex128):
        raise InvalidArgument(
            f"parameter {name} has dtype {param.dtype} and {option} {wire}, which only float32 gradients can take: "
            f"{_without(option)}"
        )
    if scheme in SCHEMES and not SCHEMES[scheme].converts:
        raise InvalidArgument(
            f"parameter {name} has scheme {scheme}, which sends numbers as they are, and {option} {wire}: "
            f"{_without(option)}, or another scheme"
        )


def _without(option: str) -> str:
    """What to do about a layer that cannot have the option. Only some options take patterns of layers."""
    return "use wire fp32 for it" if option == "wire" else f"use scheme ps for it, or leave {option} out"


_compression = functools.cache(Compression)  # most parameters have the same one, which nobody changes
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _makes_sparse(module: nn.Module) -> bool:
    return isinstance(module, _EMBEDDINGS) and module.sparse


def _may_send_rows(param: nn.Parameter, owners: list[_Owner], wanted: str, allowed: str, settings: Settings) -> bool:
    """Whether the gradient may travel as rows: a sparse one, or a dense one of embeddings alone."""
    if settings.stragglers == "drop" or not (wanted == "auto" or takes_rows(wanted)):
        return False
    if any(_makes_sparse(part) for part, _, _ in owners):
        return True
    travels_alone = takes_rows(wanted) or (param.nbytes > settings.small_bytes and not is_lossy(allowed))
    return travels_alone and _is_table(param, owners)


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
