"""Efficiency by port rate and method as a self-contained SVG: one panel per model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from poseidon.bench.drawing import MARGIN, below, coloured, curve, grid_line, heading, legend, svg
from poseidon.bench.training.results import TrainResult
from poseidon.rates import parse_rate

_PANEL_WIDTH, _PANEL_HEIGHT = 420, 260


def efficiency_plot(results: Sequence[TrainResult]) -> str:
    """Returns the SVG's text. Results without a shaped link have no rate and are left out."""
    shaped = [result for result in results if result.link is not None]
    models = list(dict.fromkeys(result.model for result in shaped))
    names = dict.fromkeys(entry.method for result in shaped for entry in result.methods)
    colours = coloured(name for name in names if name != "none")
    panels = [_panel(model, [result for result in shaped if result.model == model], colours) for model in models]
    width, height = max(1, len(models)) * _PANEL_WIDTH, _PANEL_HEIGHT + 30
    return svg(width, height, panels, (_PANEL_WIDTH, 0), legend(colours, height - 22))


def _panel(model: str, results: Sequence[TrainResult], colours: dict[str, str]) -> list[str]:
    rates = sorted({float(parse_rate(result.link)) for result in results if result.link is not None})
    low, high = math.log(rates[0] / 1.3), math.log(rates[-1] * 1.3)
    bottom, right = _PANEL_HEIGHT - MARGIN, _PANEL_WIDTH - 20

    def x_of(rate: float) -> float:
        return MARGIN + (math.log(rate) - low) / (high - low) * (right - MARGIN)

    def y_of(efficiency: float) -> float:
        return bottom - efficiency * (bottom - 30)

    parts = [heading(f"{model}: efficiency, {results[0].hosts} hosts")]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += grid_line(y_of(tick), right, f"{tick:.2f}")
    parts += [below(x_of(rate), bottom + 18, f"{rate / 1e6:g} Mb/s") for rate in rates]
    for method, colour in colours.items():
        points = [
            (x_of(rate), y_of(efficiency), f"{method} {rate / 1e6:g} Mb/s: {efficiency:.3f}")
            for rate, efficiency in _points(results, method)
        ]
        parts += curve(points, colour)
    return parts


def _points(results: Sequence[TrainResult], method: str) -> list[tuple[float, float]]:
    """The bits per second of ports, and the efficiency there."""
    return sorted(
        (parse_rate(result.link), entry.efficiency)
        for result in results
        if result.link is not None
        for entry in result.methods
        if entry.method == method
    )
