"""What Geryon's tables and prose say of its speed, and the same predicted on its device and ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from poseidon.bench.paper.figure import Figure
from poseidon.bench.priority.tables import DEVICE, PAPER_EFFICIENCIES, PAPER_HOSTS, PAPER_METHODS
from poseidon.bench.training.methods import METHODS, Method, exchange_of
from poseidon.models import ModelTable, model_table
from poseidon.planner import ClusterSpec, Planner, Prediction

_GBIT = 1e9
_VALUE_BITS = 32
_TABLES = {10.0: "Table II", 40.0: "Table III"}
_FULLY_CONNECTED = {"AlexNet": 0.9399, "VGG19": 0.8606, "YOLO": 0.7786}
# Images per second of 8 workers with VGG-19, by the slicing threshold: Geryon and TicTac.
_SLICED = {1 << 20: (279.2, 272.0), 1 << 19: (276.0, 268.0), 1 << 18: (272.8, 216.8)}


def figures() -> Iterator[Figure]:
    """All figures, in the order of the paper."""
    table = model_table("VGG19", DEVICE)
    gain = ordered_seconds(table, 8 * _GBIT, first_to_last=False) / ordered_seconds(table, 8 * _GBIT)
    yield Figure("§II-C, Figure 4b", "VGG19 at 8 Gb/s: gain of the best order over the worst", "times", 1.31, gain)
    for model, share in _FULLY_CONNECTED.items():
        yield Figure("§III-B", f"{model}: parameters that are fully connected", "", share, _connected(model))
    for rate, models in PAPER_EFFICIENCIES.items():
        yield from _efficiencies(rate, models)
    yield from _slicing()


def ordered_seconds(table: ModelTable, bits_per_second: float, *, first_to_last: bool = True) -> float:
    """An iteration by equations 1 to 5 of §II-C: parameters are pulled in one order, gradients pushed as they come."""
    times = table.durations(table.iteration_seconds)
    carried = [layer.parameter_count * _VALUE_BITS / bits_per_second for layer in table.layers]
    pulled, now = [0.0] * len(carried), 0.0
    for place in range(len(carried)) if first_to_last else reversed(range(len(carried))):
        now += carried[place]
        pulled[place] = now
    computed = 0.0
    for arrived, (forward, _) in zip(pulled, times, strict=True):
        computed = max(computed, arrived) + forward
    pushed = computed
    for (_, backward), push in zip(reversed(times), reversed(carried), strict=True):
        computed += backward
        pushed = max(pushed, computed) + push
    return pushed


def _connected(model: str) -> float:
    table = model_table(model)
    return sum(layer.parameter_count for layer in table.layers if layer.kind == "fc") / table.parameter_count


def _efficiencies(rate: float, models: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    """Tables II and III, and the speed-ups of Figure 8."""
    for model, paper in models.items():
        ours = [_step(model, METHODS[name], rate).efficiency for name in PAPER_METHODS]
        for name, theirs, efficiency in zip(PAPER_METHODS, paper, ours, strict=True):
            what = f"{model}, {PAPER_HOSTS} workers at {rate:g} GbE, {name}: efficiency"
            yield Figure(f"§V-C, {_TABLES[rate]}", what, "", theirs, efficiency)
        if model == "YOLO" and rate == 10:
            for name, theirs, efficiency in zip(PAPER_METHODS[1:], (3.62, 4.37), ours[1:], strict=True):
                yield Figure("§V-C, Figure 8", f"YOLO: {name} over vanilla", "times", theirs, efficiency / ours[0])


def _slicing() -> Iterator[Figure]:
    """Table IV. The device's time comes from its first cell."""
    for elements, paper in _SLICED.items():
        for name, theirs in zip(("geryon", "end-host"), paper, strict=True):
            method = replace(METHODS[name], chunk_bytes=elements * _VALUE_BITS // 8)
            what = f"VGG19, slices of {elements >> 10}K, {name}"
            yield Figure("§V-D, Table IV", what, "images/s", theirs, _step("VGG19", method, 10).samples_per_s)


def _step(model: str, method: Method, gbit_per_s: float) -> Prediction:
    cluster = ClusterSpec(PAPER_HOSTS, gbit_per_s * _GBIT, strict_priority=True)
    return Planner(model_table(model, DEVICE), cluster, exchange_of(method)).predict_by_message()
