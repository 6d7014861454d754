"""What travels of each byte when values are coded without loss (docs/coding.md), by the sample of real gradients."""

from __future__ import annotations

from typing import cast

from poseidon.gradients.bits import factor_bits, gradient_bits, vector_bits
from poseidon.gradients.coded_bits import FORMATS, VALUE_BITS, Format
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.layers import Exchange
from poseidon.planner.workload import PlannedUnit, Workload
from poseidon.schemes import takes_factors, takes_rows

# Of one core, in bytes of values as they are. A host's worker and its server have a thread each, which codes half of
# what leaves the host and decodes half of what comes.
_CODED_PER_S, _DECODED_PER_S = 2.5e9, 2e9
_INT8_CODED_PER_S, _INT8_DECODED_PER_S = 0.6e9, 0.8e9
_THREADS = 2
_MOST_BUSY = 0.9  # src/transport/coding_choice.h

# Of layers without zeros (docs/gradients.md): what int8 takes of its 8.125 bits, and what float32 takes.
_INT8_SHARE, _DENSE_SHARE = 0.93, 27.4 / 32

AS_THEY_ARE = (1.0, 1.0)


def codes(exchange: Exchange, cluster: ClusterSpec) -> bool:
    """Whether hosts code what they send each other: "auto" does so where threads have the time for it.

    Then it takes none of a step's: threads would wait for the port.
    """
    if exchange.coding != "auto" or cluster.hosts == 1:
        return exchange.coding == "on" and cluster.hosts > 1
    is_int8 = exchange.wire == "int8"
    coded, decoded = (_INT8_CODED_PER_S, _INT8_DECODED_PER_S) if is_int8 else (_CODED_PER_S, _DECODED_PER_S)
    busy = cluster.payload_bytes_per_s * (1 / coded + 1 / decoded) / _THREADS
    return busy <= _MOST_BUSY


def coded_shares(work: Workload, unit: PlannedUnit, scheme: str) -> tuple[float, float]:
    """What travels of each byte before servers add up, or between workers, and of each byte after."""
    given, wire = work.exchange.coded_share, work.exchange.wire
    if given is not None:
        return given, given
    if wire == "int8":
        return _int8_shares(work, unit, scheme)
    if wire not in FORMATS:
        return AS_THEY_ARE
    return _shares(work, unit, scheme, cast("Format", wire))


def _int8_shares(work: Workload, unit: PlannedUnit, scheme: str) -> tuple[float, float]:
    """Blocks of zeros cost as little as those of float32. Factors travel as bf16."""
    if takes_factors(scheme):
        return _shares(work, unit, scheme, "bf16")
    before, after = (min(1.0, share / _DENSE_SHARE) for share in _shares(work, unit, scheme, "fp32"))
    return before * _INT8_SHARE, after * _INT8_SHARE


def _shares(work: Workload, unit: PlannedUnit, scheme: str, form: Format) -> tuple[float, float]:
    if takes_factors(scheme):
        before = factor_bits(work.table, work.table.layers[unit.places[0]], form)
    else:
        before = _mean_bits(work, unit, scheme, form, work.cluster.workers_per_host)  # a host may add up its own
    after = _mean_bits(work, unit, scheme, form, work.cluster.workers)
    return before / VALUE_BITS[form], after / VALUE_BITS[form]


def _mean_bits(work: Workload, unit: PlannedUnit, scheme: str, form: Format, workers: int) -> float:
    table, total, count = work.table, 0.0, 0
    for layer, place in zip(unit.members, unit.places, strict=True):
        spec = table.layers[place]
        if layer.shape == spec.weight_shape:
            bits = gradient_bits(table, spec, form, workers, takes_rows(scheme))
        else:
            bits = vector_bits(table, form, workers)
        total += bits * layer.element_count
        count += layer.element_count
    return total / count if count else VALUE_BITS[form]
