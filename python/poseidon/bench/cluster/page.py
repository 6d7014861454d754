"""The page of `poseidon bench cluster`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from poseidon.bench.cluster.document import Compared, Found
from poseidon.report.charts import bars_chart
from poseidon.report.layout import PAGE_WIDTH, document, figure, head, legend, section, table

_TITLE = "Benchmark of a cluster"
_HEADS = ("method", "step", "predicted", "off by", "efficiency", "coding", "× DDP")
_METHOD = (
    "Layers are replayed on each machine: computation is slept, for the time that the device takes, and gradients, "
    "exchange and update are real. Methods take turns on the same machines. A step is the median of those measured. "
    "Predictions know the ports' rate and latency as measured, and nothing else of the exchange."
)


def write_page(found: Found, path: Path) -> None:
    """Writes it. Raises OSError if the file cannot be written."""
    parts = [head(_TITLE, " ".join(found.words())), section("Method", _METHOD, ""), _pairs(found)]
    by_model = groupby(found.compared, key=lambda one: one.step.model)
    parts += [_of_model(model, list(steps)) for model, steps in by_model]
    path.write_text(document(_TITLE, parts), "utf-8")


def _pairs(found: Found) -> str:
    rates, trips = found.network.rates, found.network.round_trips_s
    rows = [
        [str(source), *("" if to == source else f"{rate * 8e-9:.2f}" for to, rate in enumerate(row))]
        for source, row in enumerate(rates)
    ]
    rows += [
        [f"{source}, ms", *("" if not trip else f"{trip * 1e3:.2f}" for trip in row)]
        for source, row in enumerate(trips)
    ]
    words = "What each machine sends to each other one, in Gb/s, while it receives as much; then the round trips."
    return section("Ports and pairs", words, table(("from", *(f"to {to}" for to in range(len(rates)))), rows))


def _of_model(model: str, steps: list[Compared]) -> str:
    bars = [(one.step.method, one.efficiency, f"{one.efficiency:.3f}") for one in steps]
    peers = {one.step.method for one in steps if not one.is_own}
    picture = figure(lambda width: bars_chart(bars, width, f"Efficiency of {model}", 1.0, peers), PAGE_WIDTH)
    words = "The step without exchange over the step with it. A full bar is linear scaling."
    colours = legend([("scheme-1", "Poseidon"), ("backward", "torch's DDP, without and with its hooks")])
    return section(model, words, colours + picture + table(_HEADS, [_row(one) for one in steps]))


def _row(one: Compared) -> list[str]:
    coded, over = one.step.coded_share, one.over_ddp
    return [
        *(one.step.method, f"{one.step.step_s * 1e3:,.0f} ms", f"{one.predicted_s * 1e3:,.0f} ms", f"{one.error:+.1%}"),
        *(f"{one.efficiency:.3f}", "" if coded is None else f"{coded:.2f}", "" if over is None else f"{over:.2f}"),
    ]
