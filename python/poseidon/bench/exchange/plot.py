"""Plots of `poseidon bench exchange` as one self-contained SVG: bars against the plain copy, a panel per sweep."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from poseidon.bench.colours import COLOURS
from poseidon.bench.exchange.methods import COPY
from poseidon.bench.exchange.results import ExchangeMethodResult, ExchangeResult
from poseidon.report.svg import ticks

_PANEL_HEIGHT, _MARGIN, _TOP = 260, 50, 30
_BAR, _GAP, _SWEEP_WIDTH = 18, 26, 420


def exchange_plot(results: Sequence[ExchangeResult]) -> str:
    """The SVG's text. Results without a plain copy have no bars; sweeps need two values at least."""
    panels = [panel for panel in (_bars(results), *_sweeps(results)) if panel is not None]
    width = max((panel[0] for panel in panels), default=_SWEEP_WIDTH)
    height = max(1, len(panels)) * (_PANEL_HEIGHT + _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (_, elements) in enumerate(panels):
        parts.append(f'<g transform="translate(0,{index * (_PANEL_HEIGHT + _TOP)})">')
        parts += elements
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _name(result: ExchangeResult) -> str:
    return f"{result.model}, {result.hosts} × {result.network}, {result.placement}"


def _bars(results: Sequence[ExchangeResult]) -> tuple[int, list[str]] | None:
    """Goodput over the copy's: a group of bars per run, a bar per method that is no point of a sweep."""
    groups = [(_name(result), [entry for entry in result.methods if _has_bar(entry)]) for result in results]
    groups = [(name, entries) for name, entries in groups if entries]
    if not groups:
        return None
    names = list(dict.fromkeys(entry.method for _, entries in groups for entry in entries))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    bottom = _PANEL_HEIGHT - _MARGIN
    most = max(1.0, *(entry.copy_ratio or 0.0 for _, entries in groups for entry in entries))
    group_width = max(len(names) * _BAR + _GAP, 7 * max(len(name) for name, _ in groups))
    right = _MARGIN + len(groups) * group_width
    parts = _frame("goodput over that of plain TCP copies", right, most)
    for index, (name, entries) in enumerate(groups):
        left = _MARGIN + index * group_width + (group_width - len(entries) * _BAR) / 2
        for place, entry in enumerate(entries):
            ratio = entry.copy_ratio or 0.0
            bar_height = ratio / most * (bottom - _TOP)
            title = f"<title>{escape(f'{name}, {entry.method}: {ratio:.3f}')}</title>"
            parts.append(
                f'<rect x="{left + place * _BAR:.1f}" y="{bottom - bar_height:.1f}" width="{_BAR - 3}" '
                f'height="{bar_height:.1f}" fill="{colours[entry.method]}">{title}</rect>'
            )
        middle = _MARGIN + (index + 0.5) * group_width
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>')
    return max(right + 20, _SWEEP_WIDTH), parts + _legend(colours)


def _has_bar(entry: ExchangeMethodResult) -> bool:
    return entry.swept is None and entry.method != COPY and entry.copy_ratio is not None


def _sweeps(results: Sequence[ExchangeResult]) -> list[tuple[int, list[str]] | None]:
    """A panel per swept option: goodput by value, a line per run."""
    swept = dict.fromkeys(entry.swept for result in results for entry in result.methods if entry.swept is not None)
    return [_sweep(option, results) for option in swept]


def _sweep(option: str, results: Sequence[ExchangeResult]) -> tuple[int, list[str]] | None:
    lines = {_name(result): [entry for entry in result.methods if entry.swept == option] for result in results}
    lines = {name: entries for name, entries in lines.items() if entries}
    values = list(dict.fromkeys(entry.options[option] for entries in lines.values() for entry in entries))
    if len(values) < 2:
        return None
    most = max(entry.goodput_bits_per_second for entries in lines.values() for entry in entries) / 1e6
    bottom, right = _PANEL_HEIGHT - _MARGIN, _SWEEP_WIDTH - 20
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(lines)}
    parts = _frame(f"{option}: goodput, Mb/s", right, most)

    def x_of(value: str) -> float:
        return _MARGIN + (values.index(value) + 0.5) / len(values) * (right - _MARGIN)

    for value in values:
        parts.append(f'<text x="{x_of(value):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(value)}</text>')
    for name, entries in lines.items():
        points = [
            (x_of(entry.options[option]), bottom - entry.goodput_bits_per_second / 1e6 / most * (bottom - _TOP))
            for entry in entries
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        for (x, y), entry in zip(points, entries, strict=True):
            text = f"{name}, {entry.method}: {entry.goodput_bits_per_second / 1e6:.1f} Mb/s"
            title = f"<title>{escape(text)}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colours[name]}">{title}</circle>')
    return _SWEEP_WIDTH, parts + _legend(colours)


def _frame(heading: str, right: float, most: float) -> list[str]:
    """Heading and horizontal grid of a panel whose values go from 0 to `most`."""
    bottom = _PANEL_HEIGHT - _MARGIN
    parts = [f'<text x="{_MARGIN}" y="18" font-weight="bold">{escape(heading)}</text>']
    for tick in ticks(0, most):
        y = bottom - tick / most * (bottom - _TOP)
        parts.append(f'<line x1="{_MARGIN}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x = [], _MARGIN
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="{_PANEL_HEIGHT - 18}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{_PANEL_HEIGHT - 8}">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    return parts
