"""What the benchmarks' plots are drawn with: self-contained SVG, in which each curve or bar has a colour of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = ("#1b6ca8", "#d1495b", "#edae49", "#66a182", "#6f4e7c", "#8d8d8d", "#00798c", "#a05195")
MARGIN = 50  # left of a panel, and below it


def coloured(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in turn."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def svg(width: float, height: float, panels: Sequence[Sequence[str]], step: tuple[int, int], key: Iterable[str]) -> str:
    """The text of a picture of panels, each `step` (right, down) from the one before, and of a `key` beside them."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, elements in enumerate(panels):
        parts += [f'<g transform="translate({index * step[0]},{index * step[1]})">', *elements, "</g>"]
    return "\n".join([*parts, *key, "</svg>", ""])


def heading(text: str) -> str:
    """That of a panel."""
    return f'<text x="{MARGIN}" y="18" font-weight="bold">{escape(text)}</text>'


def below(x: float, y: float, text: str) -> str:
    """A label of the horizontal axis, in the middle of x."""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def grid_line(y: float, right: float, label: str) -> list[str]:
    """A horizontal line up to `right`, with its value beside it."""
    return [
        f'<line x1="{MARGIN}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>',
        f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
    ]


def curve(points: Sequence[tuple[float, float, str]], colour: str) -> list[str]:
    """A line through points, each with a text that is shown when the pointer is over it."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(text)}</title></circle>'
            for x, y, text in points
        ),
    ]


def legend(colours: dict[str, str], y: int) -> list[str]:
    """The names with their colours, side by side."""
    parts, x = [], MARGIN
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    return parts
