"""The ways of exchanging gradients that the benchmark compares, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from poseidon.bench.traffic import FLOAT_BYTES, bytes_per_worker
from poseidon.models import ModelTable

Library = Literal["none", "torch", "poseidon"]


@dataclass(frozen=True)
class Method:
    """One way of exchanging gradients.

    scheme: of Poseidon's factorable layers. options: of `poseidon.init`. fp16: torch DDP's compression hook.
    """

    name: str
    library: Library
    description: str
    scheme: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    fp16: bool = False

    def closed_form_bytes(self, table: ModelTable, worker_count: int) -> float:
        """Bytes sent plus received by one worker in one step, payload only."""
        if self.library == "none":
            return 0.0
        if self.library == "torch":  # ring all-reduce moves what the sharded parameter server moves
            return bytes_per_worker(table, worker_count, "ps", FLOAT_BYTES // 2 if self.fp16 else FLOAT_BYTES)
        return bytes_per_worker(table, worker_count, self.scheme)


METHODS = {
    method.name: method
    for method in (
        Method("none", "none", "the same processes in step, without any exchange"),
        Method("poseidon", "poseidon", "wait-free, the cheaper of ps and sfb for every layer"),
        Method("wfbp-ps", "poseidon", "wait-free, every layer through the parameter server", scheme="ps"),
        Method(
            "ps-sequential",
            "poseidon",
            "parameter server, exchange after the whole backward pass",
            scheme="ps",
            options={"schedule": "sequential"},
        ),
        # TensorFlow also fetched parameters only at the start of an iteration; leaving that out is in its favour and
        # keeps the partition the one difference from wfbp-ps.
        Method(
            "coarse-ps",
            "poseidon",
            "wait-free parameter server with a whole tensor per shard, as TensorFlow cut them",
            scheme="ps",
            options={"partition": "coarse"},
        ),
        Method("adam", "poseidon", "factors to one shard, the dense matrix back (Project Adam)", scheme="adam"),
        Method("ddp", "torch", "torch DistributedDataParallel over Gloo"),
        Method("ddp-fp16", "torch", "the same with its fp16 compression hook (lossy)", fp16=True),
    )
}


def parse_methods(text: str) -> list[Method]:
    """Methods from a comma-separated list; "none" comes first, added if missing, since efficiency needs it.

    Raises ValueError for an unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; known are {', '.join(METHODS)}")
    return [METHODS[name] for name in dict.fromkeys(["none", *names])]
