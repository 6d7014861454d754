"""Which room may look into which (ARCHITECTURE.md).

A room is a folder, or a file that has no folder of its own. An include or import is judged in the folder where the two
paths part: there the one neighbour must be allowed to use the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from structure.edges import Edge

Doors = Mapping[str, set[str] | None]

# What a room of src/ may include, besides itself and the public headers.
CPP_DOORS: Doors = {
    "base": set(),
    "kernel": {"base"},
    "plan": {"base"},
    "wire": {"base"},
    "transport": {"base", "wire", "kernel"},
    "rendezvous": {"base", "wire", "transport"},
    "scheme": {"base", "plan", "wire", "kernel", "transport"},
    "server": {"base", "plan", "wire", "kernel", "transport"},
    "collective": {"base", "scheme", "plan", "wire", "kernel", "transport"},
    "client": {"base", "collective", "scheme", "plan", "wire", "transport", "rendezvous"},
    "worker": {"base", "client", "server", "plan", "wire", "transport", "rendezvous"},
    "bindings": set(),
    "server/chunk": set(),
    "server/pace": {"chunk"},
    "server/checkpoint": {"chunk"},
    "server/core": {"chunk", "pace", "checkpoint"},
    "server/baselines": {"chunk", "core"},
}

# What every adapter of a framework may import.
_FOR_ADAPTERS = {
    "errors",
    "options",
    "chunk_cache",
    "failure_marks",
    "live",
    "notices",
    "restore",
    "rates",
    "schemes",
    "version",
    "_core",
}

# What a room of python/poseidon may import, besides itself. None: all others, as far as no circle comes of it.
PYTHON_DOORS: Doors = {
    "version": set(),
    "errors": set(),
    "dscp": set(),
    "options": {"errors", "dscp", "_core"},
    "failure_marks": {"errors", "options"},
    "chunk_cache": {"options", "version", "_core"},
    "notices": {"_core"},
    "restore": {"errors", "_core"},
    "schemes": {"_core"},
    "exchange": {"errors", "options", "chunk_cache", "notices", "restore", "adapter", "_core"},
    "adapter": _FOR_ADAPTERS,
    "adapter/choice": {"agreement", "control", "cost", "layer", "state_text", "stats"},
    "torch": {*_FOR_ADAPTERS, "adapter"},
    "torch/tensors": set(),
    "torch/process": {"tensors"},
    "torch/model": {"tensors"},
    "torch/exchange": {"tensors", "model"},
    "torch/training": {"tensors", "process", "model", "exchange"},
    "torch/ddp": {"tensors", "process", "model", "exchange", "training"},
    "torch/optimizer": {"tensors", "process", "model", "exchange", "ddp"},
    "torch/local_sgd": {"tensors", "process", "model", "exchange", "training", "optimizer"},
    "torch/elastic": {"process"},
    "torch/recovery": {"tensors", "process", "model", "exchange", "ddp", "elastic", "optimizer", "local_sgd"},
    "torch/replace": {"ddp"},
    "torch/drop_in": {"backend", "replace"},
    "torch/measure_script": {"model", "tensors"},
    "torch/backend": {"tensors", "process"},
    "torch/lightning": {"process", "ddp", "elastic", "optimizer", "recovery"},
    "torch/hugging_face": {"process", "ddp", "elastic", "optimizer", "recovery"},
    "jax": {*_FOR_ADAPTERS, "adapter"},
    "tensorflow": {*_FOR_ADAPTERS, "adapter"},
    "models": {"errors"},
    "gradients": {"models", "_core"},
    "planner": {
        "errors",
        "gradients",
        "options",
        "rates",
        "schemes",
        "adapter",
        "models",
        "report",
        "testbed",
        "_core",
    },
    "report": {"errors", "adapter", "rates", "schemes", "torch", "version"},
    "rates": {"errors"},
    "testbed": {"errors", "dscp", "rates"},
    "doctor": {"errors", "live"},
    "racks": {"errors", "options", "exchange"},
    "check": {"errors", "options", "exchange", "racks", "rates"},
    "live": {"_core"},
    "admin": {"errors", "options"},
    "watch": {"errors", "admin", "live", "rates"},
    "launch": {"dscp", "errors", "options", "failure_marks", "testbed"},
    "cluster": {"errors", "options", "failure_marks", "version", "live", "check", "launch"},
    "cli": None,
    "bench": None,
    "bench/hosts": set(),
    "bench/paper": {"training", "priority"},
    "bench/suite": {"training"},
    "bench/cluster": {"hosts", "training"},
    "bench/exchange": {"hosts", "drawing", "network_options", "progress"},
    "bench/training": {"hosts", "drawing", "network_options", "progress"},
    "bench/priority": {"hosts", "training", "network_options", "progress"},
}


def check_doors(edges: Iterable[Edge], base: Path, doors: Doors) -> Iterator[str]:
    """What rooms below `base` use of their neighbours without being allowed to.

    A key of `doors` is a room's path below `base`, its value the neighbours in the same folder that it may use. A room
    without a key may use all of them.
    """
    for edge in edges:
        if not (edge.source.is_relative_to(base) and edge.target.is_relative_to(base)):
            continue
        source, target = edge.source.relative_to(base).parts, edge.target.relative_to(base).parts
        level = parting(source, target)
        room = "/".join(source[: level + 1]).rsplit(".", 1)[0]
        neighbour = target[level].rsplit(".", 1)[0]
        allowed = doors.get(room)
        if allowed is not None and neighbour not in {*allowed, source[level].rsplit(".", 1)[0]}:
            yield f"{edge}: {room} may not use {neighbour}"


def check_rooms_are_listed(files: Iterable[Path], base: Path, doors: Doors) -> Iterator[str]:
    """Folders directly below `base` that the table of doors does not name."""
    folders = {path.relative_to(base).parts[0] for path in files if len(path.relative_to(base).parts) > 1}
    for folder in sorted(folders - set(doors)):
        yield f"{base / folder}: this room has no row in tools/structure/rooms.py"


def parting(source: tuple[str, ...], target: tuple[str, ...]) -> int:
    """How many leading parts two different paths have in common."""
    return next(level for level, pair in enumerate(zip(source, target, strict=False)) if pair[0] != pair[1])
