"""What `poseidon bench exchange` can run: workloads, placements of the servers, methods and sweeps, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from poseidon.bench.hosts.measures import FLOAT_BYTES
from poseidon.errors import InvalidArgument
from poseidon.models import MODELS, model_table, scaled
from poseidon.options import BY_NAME, OPTIONS, parse_bytes

Library = Literal["poseidon", "gloo", "mpi", "tcp-copy", "tcp-stream"]

# What this benchmark decides itself.
_RESERVED = ("servers", "job", "scheme", "timeout")


@dataclass(frozen=True)
class Workload:
    """What is exchanged in every step: the name and the number of elements of float32 tensors, in forward order."""

    name: str
    tensors: tuple[tuple[str, int], ...]

    @property
    def element_count(self) -> int:
        """The number of elements of all tensors."""
        return sum(count for _, count in self.tensors)

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors: S of the closed forms."""
        return self.element_count * FLOAT_BYTES

    @property
    def largest_bytes(self) -> int:
        """The bytes of the largest tensor."""
        return max(count for _, count in self.tensors) * FLOAT_BYTES


def parse_workload(text: str, scale: int) -> Workload:
    """Returns the parameter tensors of a model's table, scaled, or COUNT equal tensors of "tensors:COUNTxBYTES".

    Raises InvalidArgument for anything else.
    """
    if text.startswith("tensors:"):
        return _synthetic(text)
    try:
        table = scaled(model_table(text), scale)
    except ValueError as error:
        raise InvalidArgument(f"{error}, or tensors:COUNTxBYTES such as tensors:1x256MB") from None
    tensors = tuple((f"{layer.name}.{name}", count) for layer in table.layers for name, count in layer.tensors.items())
    return Workload(table.name if scale == 1 else f"{table.name}/{scale}", tensors)


def _synthetic(text: str) -> Workload:
    count_text, _, size_text = text.removeprefix("tensors:").partition("x")
    try:
        count, size_bytes = int(count_text), parse_bytes(size_text)
    except ValueError:
        count, size_bytes = 0, 0
    if not 1 <= count <= 1_000_000 or size_bytes < FLOAT_BYTES or size_bytes % FLOAT_BYTES:
        raise InvalidArgument(
            f"the model is {text!r}: synthetic tensors are tensors:COUNTxBYTES, from 1 to 1000000 of a multiple of "
            f"{FLOAT_BYTES} bytes each, such as tensors:1x256MB or tensors:10000x1KB; models are {', '.join(MODELS)}"
        )
    return Workload(text, tuple((f"tensor{index}", size_bytes // FLOAT_BYTES) for index in range(count)))


@dataclass(frozen=True)
class Placement:
    """Where the servers are (Parameter Hub §2.1, Figure 4).

    P is the number of workers, S the bytes of all tensors. `server_count` gives the number of dedicated servers for P
    workers, and `own_hosts` says whether they have hosts of their own. `sent_bytes` gives what one worker's host sends
    in a step, from S and P. It receives as much. In cc that is what a worker without the server sends, and in ncs:N
    what a server's host sends, if that is more.
    """

    name: str
    description: str
    server_count: Callable[[int], int]
    own_hosts: bool
    sent_bytes: Callable[[int, int], float]

    def host_count(self, worker_count: int) -> int:
        """The number of hosts that a run needs."""
        return worker_count + (self.server_count(worker_count) if self.own_hosts else 0)


def sharded_bytes(size_bytes: int, worker_count: int) -> float:
    """What one host sends with P colocated shards or in an optimal all-reduce: 2·S·(P − 1)/P."""
    return 2 * size_bytes * (worker_count - 1) / worker_count


PLACEMENTS = {
    placement.name: placement
    for placement in (
        Placement("cs", "colocated sharded: every worker hosts a shard", lambda _: 0, False, sharded_bytes),
        Placement("cc", "colocated centralized: one server on worker 0's host", lambda _: 1, False, lambda s, _: s),
        Placement("ncc", "non-colocated centralized: one server, its own host", lambda _: 1, True, lambda s, _: s),
        Placement("ncs", "non-colocated sharded: P servers, P hosts of their own", lambda p: p, True, lambda s, _: s),
    )
}


FEW_SERVERS_HELP = {"ncs:N": "N servers, N hosts of their own"}


def parse_placement(name: str) -> Placement:
    """Returns the placement of this name. Raises InvalidArgument if there is none."""
    kind, colon, count_text = name.partition(":")
    if kind == "ncs" and colon and count_text.isdecimal() and int(count_text) > 0:
        count = int(count_text)
        # Each of them sends its part of all results to every worker, which may be more than a worker sends.
        return Placement(name, FEW_SERVERS_HELP["ncs:N"], lambda _: count, True, lambda s, p: s * max(1, p / count))
    if name not in PLACEMENTS:
        raise InvalidArgument(f"unknown placement {name!r}; known are {', '.join([*PLACEMENTS, *FEW_SERVERS_HELP])}")
    return PLACEMENTS[name]


@dataclass(frozen=True)
class ExchangeMethod:
    """One way of exchanging.

    `options` are Poseidon's, as text. `swept` names the option if this method is a point of its sweep.
    """

    name: str
    library: Library
    options: Mapping[str, str] = field(default_factory=dict)
    swept: str | None = None

    def sent_bytes(self, placement: Placement, size_bytes: int, worker_count: int) -> float:
        """The payload that one worker must send in a step. It receives as much."""
        if self.library in ("gloo", "mpi"):
            return sharded_bytes(size_bytes, worker_count)
        return placement.sent_bytes(size_bytes, worker_count)


COPY = "tcp-copy"  # the method that goodput is compared with
METHOD_HELP = {
    "poseidon": "this library",
    "gloo": "all-reduce of one flat tensor by torch.distributed, on the first port",
    "mpi": "MPI_Allreduce of one flat buffer by MPICH over TCP, if installed, on the first port",
    COPY: "plain TCP copies of the bytes that a worker sends, from and into the arrays, every host to the next at "
    "once, split evenly between the ports",
    "tcp-stream": "the same from and into one block that stays in the cache",
}
ABLATIONS = ("aggregation", "assignment", "reduce_order")


def parse_option(text: str) -> tuple[str, str]:
    """Splits "NAME=VALUE" and checks both. Raises InvalidArgument, which names what is allowed."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    known = [option.name for option in OPTIONS if option.name not in _RESERVED]
    if not equals or name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(known)}"
        raise InvalidArgument(f"{text!r} is no NAME=VALUE of an option of Poseidon: {hint}")
    BY_NAME[name].read(value, name)
    return name, value


def parse_methods(
    methods: str, options: Iterable[str] = (), sweeps: Iterable[str] = (), ablations: Iterable[str] = ()
) -> list[ExchangeMethod]:
    """Returns the methods of one run: those named, then each value of each sweep and ablation.

    `methods` has names separated by commas. Each of `options` is "NAME=VALUE" and holds for every method of Poseidon.
    Each of `sweeps` is "NAME=VALUE,VALUE,…". Messages go over TCP, as those of the other libraries do, unless an option
    says otherwise. Raises InvalidArgument.
    """
    common = {"transport": "tcp", **dict(parse_option(text) for text in options)}
    found: dict[str, ExchangeMethod] = {}
    for name in (name.strip() for name in methods.split(",")):
        if not name:
            continue
        if name not in METHOD_HELP:
            raise InvalidArgument(f"unknown method {name!r}; known are {', '.join(METHOD_HELP)}")
        library: Library = name  # type: ignore[assignment]
        found[name] = ExchangeMethod(name, library, common if name == "poseidon" else {})
    for name, values in [*map(_parse_sweep, sweeps), *map(_parse_ablation, ablations)]:
        for value in values:
            label = f"{name}={value}"
            found[label] = ExchangeMethod(label, "poseidon", {**common, name: value}, swept=name)
    if not found:
        raise InvalidArgument(f"there is nothing to measure; methods are {', '.join(METHOD_HELP)}")
    return list(found.values())


def _parse_sweep(text: str) -> tuple[str, Sequence[str]]:
    name, _, values = text.partition("=")
    pairs = [parse_option(f"{name}={value.strip()}") for value in values.split(",") if value.strip()]
    if not pairs:
        raise InvalidArgument(f"the sweep is {text!r}: it must be NAME=VALUE,VALUE,… such as chunk_bytes=64k,256k,1M")
    return pairs[0][0], [value for _, value in pairs]


def _parse_ablation(name: str) -> tuple[str, Sequence[str]]:
    if name not in ABLATIONS:
        raise InvalidArgument(f"unknown ablation {name!r}; known are {', '.join(ABLATIONS)}")
    return name, BY_NAME[name].choices
