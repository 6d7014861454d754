"""Efficiency by port rate and method as a self-contained SVG: one panel per model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from poseidon.bench.colours import COLOURS
from poseidon.bench.training.results import TrainResult
from poseidon.rates import parse_rate

_PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN = 420, 260, 50


class _Point(NamedTuple):
    bits_per_second: float
    efficiency: float


def efficiency_plot(results: Sequence[TrainResult]) -> str:
    """Returns the SVG's text. Results without a shaped link have no rate and are left out."""
    shaped = [result for result in results if result.link is not None]
    models = list(dict.fromkeys(result.model for result in shaped))
    names = dict.fromkeys(entry.method for result in shaped for entry in result.methods)
    methods = [name for name in names if name != "none"]
    colours = {method: COLOURS[index % len(COLOURS)] for index, method in enumerate(methods)}
    width, height = max(1, len(models)) * _PANEL_WIDTH, _PANEL_HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, model in enumerate(models):
        parts.append(f'<g transform="translate({index * _PANEL_WIDTH},0)">')
        parts += _panel(model, [result for result in shaped if result.model == model], colours)
        parts.append("</g>")
    for index, (method, colour) in enumerate(colours.items()):
        x = _MARGIN + index * 110
        parts.append(f'<rect x="{x}" y="{height - 22}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{height - 12}">{escape(method)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(model: str, results: Sequence[TrainResult], colours: dict[str, str]) -> list[str]:
    rates = sorted({float(parse_rate(result.link)) for result in results if result.link is not None})
    low, high = math.log(rates[0] / 1.3), math.log(rates[-1] * 1.3)
    bottom, right = _PANEL_HEIGHT - _MARGIN, _PANEL_WIDTH - 20

    def x_of(rate: float) -> float:
        return _MARGIN + (math.log(rate) - low) / (high - low) * (right - _MARGIN)

    def y_of(efficiency: float) -> float:
        return bottom - efficiency * (bottom - 30)

    parts: list[str] = [
        f'<text x="{_MARGIN}" y="18" font-weight="bold">{escape(model)}: efficiency, {results[0].hosts} hosts</text>'
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = y_of(tick)
        parts.append(f'<line x1="{_MARGIN}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>')
    for rate in rates:
        label = f"{rate / 1e6:g} Mb/s"
        parts.append(f'<text x="{x_of(rate):.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for method, colour in colours.items():
        points = _points(results, method)
        path = " ".join(f"{x_of(rate):.1f},{y_of(efficiency):.1f}" for rate, efficiency in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for rate, efficiency in points:
            title = f"<title>{escape(method)} {rate / 1e6:g} Mb/s: {efficiency:.3f}</title>"
            position = f'cx="{x_of(rate):.1f}" cy="{y_of(efficiency):.1f}"'
            parts.append(f'<circle {position} r="3.5" fill="{colour}">{title}</circle>')
    return parts


def _points(results: Sequence[TrainResult], method: str) -> list[_Point]:
    points = [
        _Point(parse_rate(result.link), entry.efficiency)
        for result in results
        if result.link is not None
        for entry in result.methods
        if entry.method == method
    ]
    return sorted(points)
