"""The ways of exchanging gradients that the benchmark compares, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from poseidon.bench.training.traffic import LayerTraffic, averaging_bytes, traffic
from poseidon.errors import InvalidArgument
from poseidon.models import ModelTable
from poseidon.options import BY_NAME
from poseidon.planner import Exchange
from poseidon.schemes import workers_multiply

Library = Literal["none", "torch", "poseidon"]

# The sizes into which Poseidon cuts and groups what it sends, and the least it accepts.
_LEAST_SIZES = {"chunk_bytes": 64, "small_bytes": 0, "group_bytes": 1}
# Geryon's slicing threshold of 1,024K. It counts elements: in bytes VGG-19 would have at least 548 slices, not its 320.
_SLICE_BYTES = 4 << 20
_LOCAL_STEPS = 16
_UNSLICED_BYTES = 1 << 34  # the most that chunk_bytes may be
_POWERSGD_RANK = 4


def scaled_size(name: str, size_bytes: int, scale: int) -> int:
    """Returns the option `name` for weights whose dimensions are divided by `scale`.

    `size_bytes` is its value for whole weights.
    """
    return max(_LEAST_SIZES[name], size_bytes // scale**2)


def scaled_sizes(scale: int) -> dict[str, int]:
    """Returns Poseidon's default sizes for weights whose dimensions are divided by `scale`."""
    return {name: scaled_size(name, BY_NAME[name].default, scale) for name in _LEAST_SIZES}


@dataclass(frozen=True)
class Method:
    """One way of exchanging gradients.

    `scheme` is that of Poseidon's factorable layers. `options` are those of `poseidon.init`. With `overlap` a
    DistributedOptimizer updates each layer when its gradient is in, and the next forward pass waits layer by layer.
    `chunk_bytes` is for unscaled weights; None takes the run's. `wire` is how numbers travel: Poseidon's option of that
    name, or torch DDP's compression hook for "bf16" and "fp16". `powersgd_rank` is for Poseidon's scheme of that name,
    or adds torch DDP's PowerSGD hook. With `on_servers` AdamW runs on the servers, which return parameters. `dtype` is
    the type of the model's numbers, "fp32" or "bf16". With `every` above 1 a LocalSGD averages after so many steps. Its
    `wire` is that of pseudo-gradients, and `fragments` and `overlap_steps` are its own. torch's DDP uses `backend`.
    """

    name: str
    library: Library
    description: str
    scheme: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    overlap: bool = False
    chunk_bytes: int | None = None
    wire: str = "fp32"
    powersgd_rank: int | None = None
    on_servers: bool = False
    dtype: str = "fp32"
    every: int = 1
    fragments: int = 1
    overlap_steps: int = 0
    backend: str = "gloo"

    @property
    def all_through_ps(self) -> bool:
        """Whether Poseidon sends every layer to the parameter server in every step. True for other libraries."""
        return self.library != "poseidon" or (self.scheme == "ps" and self.every == 1)

    def scaled(self, scale: int) -> Method:
        """Returns this method for weights whose dimensions are divided by `scale`."""
        options = dict(self.options)
        if self.chunk_bytes is not None:
            options["chunk_bytes"] = scaled_size("chunk_bytes", self.chunk_bytes, scale)
        rank = None if self.powersgd_rank is None else max(1, self.powersgd_rank // scale)
        if rank is not None and self.library == "poseidon":
            options["powersgd_rank"] = rank
        return replace(self, options=options, powersgd_rank=rank)

    def closed_form_bytes(self, table: ModelTable, worker_count: int, small_bytes: int = 0) -> float:
        """Returns the payload bytes that one worker sends plus receives in one step.

        `small_bytes` is Poseidon's option of that name.
        """
        return sum(self.layer_bytes(table, worker_count, small_bytes))

    def layer_bytes(self, table: ModelTable, worker_count: int, small_bytes: int = 0) -> list[float]:
        """Returns the part of each layer in `closed_form_bytes`, in forward order."""
        if self.library == "none":
            return [0.0] * len(table.layers)
        if self.every > 1:
            return [averaging_bytes(layer, worker_count, self.wire) / self.every for layer in table.layers]
        return [one.bytes for one in self._traffic(table, worker_count, small_bytes)]

    def product_rows(self, table: ModelTable, worker_count: int, small_bytes: int = 0) -> list[int]:
        """Returns how many rows of received factors each worker multiplies for each layer, in forward order."""
        if self.library != "poseidon" or self.every > 1:
            return [0] * len(table.layers)
        return [
            table.factor_count(layer) * (worker_count - 1) if workers_multiply(one.scheme) else 0
            for layer, one in zip(table.layers, self._traffic(table, worker_count, small_bytes), strict=True)
        ]

    def _traffic(self, table: ModelTable, worker_count: int, small_bytes: int) -> list[LayerTraffic]:
        scheme, rank = self.scheme, self.powersgd_rank or _POWERSGD_RANK
        if self.library == "torch":  # ring all-reduce moves what the sharded parameter server moves
            scheme, small_bytes = "ps" if self.powersgd_rank is None else "powersgd", 0
        sizes = {"small_bytes": small_bytes}
        wire = self.wire if self.dtype == "fp32" else self.dtype  # what has as many bytes
        return traffic(table, worker_count, Exchange(scheme, wire, sizes=sizes, replayed=True, powersgd_rank=rank))


def _ps(name: str, description: str, **options: Any) -> Method:
    return Method(name, "poseidon", description, "ps", options)


def _overlapped_ps(name: str, description: str, chunk_bytes: int | None, **options: Any) -> Method:
    return replace(_ps(name, description, **options), overlap=True, chunk_bytes=chunk_bytes)


def _rounded(name: str, **changes: Any) -> list[Method]:
    """A method of Poseidon in each wire format that rounds."""
    return [
        Method(
            f"{name}-{wire}", "poseidon", f"{name}, with numbers rounded to {wire} on their way", wire=wire, **changes
        )
        for wire in ("bf16", "fp16", "int8")
    ]


def _plain(name: str, **changes: Any) -> Method:
    """A method of Poseidon without coding."""
    return Method(f"{name}-plain", "poseidon", f"{name} with coding=off", options={"coding": "off"}, **changes)


def _on_servers(name: str, description: str, dtype: str) -> Method:
    return Method(name, "poseidon", description, "ps", overlap=True, on_servers=True, dtype=dtype)


def _lossy(name: str, **changes: Any) -> list[Method]:
    """A method of Poseidon with each lossy scheme for all layers."""
    return [
        Method(
            f"{name}-{scheme}",
            "poseidon",
            f"{name}, every layer above small_bytes with {scheme} (lossy)",
            scheme,
            powersgd_rank=_POWERSGD_RANK if scheme == "powersgd" else None,
            **changes,
        )
        for scheme in ("powersgd", "topk", "onebit")
    ]


_UNORDERED = {"priority_order": "random", "priority_classes": 1}  # as TensorFlow fetches parameters

METHODS = {
    method.name: method
    for method in (
        Method("none", "none", "the same processes in step, without any exchange"),
        Method("poseidon", "poseidon", "wait-free, the cheapest of ps, sfb and sharded_factors for every layer"),
        _ps("wfbp-ps", "wait-free, every layer through the parameter server"),
        Method("wfbp-sfb", "poseidon", "wait-free, every fully connected layer by its factors", scheme="sfb"),
        _ps("wfbp-ps-alone", "wfbp-ps, and workers of one host do not add up among themselves", reduce_by_host="off"),
        _ps("ps-sequential", "parameter server, exchange after the whole backward pass", schedule="sequential"),
        # TensorFlow also fetched parameters only at the start of an iteration; leaving that out is in its favour and
        # keeps the partition the one difference from wfbp-ps.
        _ps(
            "coarse-ps",
            "wait-free parameter server with a whole tensor per shard, as TensorFlow cut them",
            partition="coarse",
        ),
        Method(
            "project_adam", "poseidon", "factors to one shard, the dense matrix back (Project Adam)", "project_adam"
        ),
        Method(
            "overlap", "poseidon", "poseidon with DistributedOptimizer: the next forward waits by layer", overlap=True
        ),
        _plain("poseidon"),
        _plain("overlap", overlap=True),
        _on_servers("server", 'update="server": AdamW on the servers, which return parameters', "fp32"),
        _on_servers("server-bf16", "the same with a bf16 model, whose float32 masters the servers have", "bf16"),
        *_rounded("poseidon"),
        *_rounded("overlap", overlap=True),
        *_lossy("poseidon"),
        *_lossy("overlap", overlap=True),
        _overlapped_ps("overlap-ps", "the same, every layer through the parameter server", None),
        # Geryon's ablation (Figure 7, Tables II to IV). All of them overlap with the next forward pass.
        _overlapped_ps("vanilla", "a whole tensor per shard, in random order", None, partition="coarse", **_UNORDERED),
        _overlapped_ps(
            "partition", "every tensor in one part per shard, in random order", _UNSLICED_BYTES, **_UNORDERED
        ),
        _overlapped_ps(
            "slicing", "the parts sliced (4 MiB over the scale's square), in random order", _SLICE_BYTES, **_UNORDERED
        ),
        _overlapped_ps(
            "end-host", "slicing, the hosts send by urgency, one class (TicTac, P3)", _SLICE_BYTES, priority_classes=1
        ),
        _overlapped_ps("geryon", "slicing, the hosts send by urgency, a flow per class in the network", _SLICE_BYTES),
        _overlapped_ps(
            "geryon-coarse",
            "geryon with convolutions in the first class, fully connected layers in the last",
            _SLICE_BYTES,
            priority_threshold="coarse",
        ),
        Method("local-sgd", "poseidon", "LocalSGD: parameters are averaged after every 16th step", every=_LOCAL_STEPS),
        Method("local-sgd-bf16", "poseidon", "the same with pseudo-gradients in bf16", wire="bf16", every=_LOCAL_STEPS),
        Method(
            "local-sgd-streaming",
            "poseidon",
            "LocalSGD in 4 fragments, each under way during 4 steps",
            every=_LOCAL_STEPS,
            fragments=4,
            overlap_steps=4,
        ),
        Method("ddp", "torch", "torch DistributedDataParallel over Gloo"),
        Method("ddp-backend", "torch", "torch DistributedDataParallel over Poseidon's backend", backend="poseidon"),
        Method("ddp-fp16", "torch", "ddp with its fp16 compression hook (lossy)", wire="fp16"),
        Method("ddp-bf16", "torch", "the same with its bf16 compression hook (lossy)", wire="bf16"),
        Method(
            "ddp-powersgd", "torch", "the same with its PowerSGD hook, rank 4 (lossy)", powersgd_rank=_POWERSGD_RANK
        ),
    )
}


def parse_methods(text: str) -> list[Method]:
    """Those of a comma-separated list, as `methods_named` returns them."""
    return methods_named([name.strip() for name in text.split(",") if name.strip()])


def methods_named(names: Sequence[str]) -> list[Method]:
    """The methods of these names, each once. "none" comes first, since efficiency needs it.

    Raises InvalidArgument for an unknown name.
    """
    for name in names:
        if name not in METHODS:
            raise InvalidArgument(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return [METHODS[name] for name in dict.fromkeys(["none", *names])]


_EXCHANGE_FIELDS = {
    "partition": "partition",
    "schedule": "schedule",
    "priority_order": "order",
    "priority_classes": "classes",
    "coding": "coding",
}


def exchange_of(method: Method, scale: int = 1, threshold: str | float = "auto") -> Exchange:
    """The exchange of a method of Poseidon for weights whose dimensions are divided by `scale`.

    `threshold` is that of methods without their own. Raises ValueError for a method that no prediction knows.
    """
    options = dict(method.scaled(scale).options)
    sizes = scaled_sizes(scale)
    sizes |= {name: options.pop(name) for name in sizes if name in options}
    threshold = options.pop("priority_threshold", threshold)
    known = method.library == "poseidon" and method.every == 1 and not method.on_servers
    if not known or options.keys() - _EXCHANGE_FIELDS.keys():
        raise ValueError(f"no prediction knows the method {method.name!r}")
    return Exchange(
        scheme=method.scheme,
        wire=method.wire,
        overlap=method.overlap,
        threshold=threshold,
        by_time=False,
        sizes=sizes,
        replayed=True,
        **{_EXCHANGE_FIELDS[name]: value for name, value in options.items()},
    )
