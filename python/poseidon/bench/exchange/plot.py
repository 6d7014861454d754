"""Plots of `poseidon bench exchange` as one self-contained SVG: bars against the plain copy, a panel per sweep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from poseidon.bench.drawing import MARGIN, below, coloured, curve, grid_line, heading, legend, svg
from poseidon.bench.exchange.methods import COPY
from poseidon.bench.exchange.results import ExchangeMethodResult, ExchangeResult
from poseidon.report.svg import ticks

_PANEL_HEIGHT, _TOP = 260, 30
_BOTTOM = _PANEL_HEIGHT - MARGIN
_BAR, _GAP, _SWEEP_WIDTH = 18, 26, 420


def exchange_plot(results: Sequence[ExchangeResult]) -> str:
    """The SVG's text. Results without a plain copy have no bars; sweeps need two values at least."""
    swept = dict.fromkeys(entry.swept for result in results for entry in result.methods if entry.swept is not None)
    panels = [panel for panel in (_bars(results), *(_sweep(option, results) for option in swept)) if panel is not None]
    width = max((panel[0] for panel in panels), default=_SWEEP_WIDTH)
    height = _PANEL_HEIGHT + _TOP
    return svg(width, max(1, len(panels)) * height, [elements for _, elements in panels], (0, height), ())


def _name(result: ExchangeResult) -> str:
    return f"{result.model}, {result.hosts} × {result.network}, {result.placement}"


def _bars(results: Sequence[ExchangeResult]) -> tuple[int, list[str]] | None:
    """Goodput over the copy's: a group of bars per run, a bar per method that is no point of a sweep."""
    groups = [(_name(result), [entry for entry in result.methods if _has_bar(entry)]) for result in results]
    groups = [(name, entries) for name, entries in groups if entries]
    if not groups:
        return None
    colours = coloured(dict.fromkeys(entry.method for _, entries in groups for entry in entries))
    most = max(1.0, *(entry.copy_ratio or 0.0 for _, entries in groups for entry in entries))
    group_width = max(len(colours) * _BAR + _GAP, 7 * max(len(name) for name, _ in groups))
    right = MARGIN + len(groups) * group_width
    parts = _frame("goodput over that of plain TCP copies", right, most)
    for index, (name, entries) in enumerate(groups):
        left = MARGIN + index * group_width + (group_width - len(entries) * _BAR) / 2
        for place, entry in enumerate(entries):
            ratio = entry.copy_ratio or 0.0
            bar_height = ratio / most * (_BOTTOM - _TOP)
            title = f"<title>{escape(f'{name}, {entry.method}: {ratio:.3f}')}</title>"
            parts.append(
                f'<rect x="{left + place * _BAR:.1f}" y="{_BOTTOM - bar_height:.1f}" width="{_BAR - 3}" '
                f'height="{bar_height:.1f}" fill="{colours[entry.method]}">{title}</rect>'
            )
        parts.append(below(MARGIN + (index + 0.5) * group_width, _BOTTOM + 16, name))
    return max(right + 20, _SWEEP_WIDTH), parts + legend(colours, _PANEL_HEIGHT - 18)


def _has_bar(entry: ExchangeMethodResult) -> bool:
    return entry.swept is None and entry.method != COPY and entry.copy_ratio is not None


def _sweep(option: str, results: Sequence[ExchangeResult]) -> tuple[int, list[str]] | None:
    lines = {_name(result): [entry for entry in result.methods if entry.swept == option] for result in results}
    lines = {name: entries for name, entries in lines.items() if entries}
    values = list(dict.fromkeys(entry.options[option] for entries in lines.values() for entry in entries))
    if len(values) < 2:
        return None
    most = max(entry.goodput_bits_per_second for entries in lines.values() for entry in entries) / 1e6
    right, colours = _SWEEP_WIDTH - 20, coloured(lines)
    parts = _frame(f"{option}: goodput, Mb/s", right, most)

    def x_of(value: str) -> float:
        return MARGIN + (values.index(value) + 0.5) / len(values) * (right - MARGIN)

    parts += [below(x_of(value), _BOTTOM + 16, value) for value in values]
    for name, entries in lines.items():
        rates = [entry.goodput_bits_per_second / 1e6 for entry in entries]
        points = [
            (x_of(entry.options[option]), _y_of(rate, most), f"{name}, {entry.method}: {rate:.1f} Mb/s")
            for entry, rate in zip(entries, rates, strict=True)
        ]
        parts += curve(points, colours[name])
    return _SWEEP_WIDTH, parts + legend(colours, _PANEL_HEIGHT - 18)


def _y_of(value: float, most: float) -> float:
    return _BOTTOM - value / most * (_BOTTOM - _TOP)


def _frame(text: str, right: float, most: float) -> list[str]:
    """Heading and horizontal grid of a panel whose values go from 0 to `most`."""
    lines = [grid_line(_y_of(tick, most), right, f"{tick:g}") for tick in ticks(0, most)]
    return [heading(text), *(element for line in lines for element in line)]
