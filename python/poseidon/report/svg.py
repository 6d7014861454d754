"""A small SVG writer for the report: a list of elements, a linear scale, round ticks, and readable numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from os.path import commonprefix

CHARACTER_WIDTH = 6.6  # of the 12 px text, a little more than most fonts need


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] of the data to [start, end] on the canvas."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


@dataclass
class Canvas:
    """An SVG picture that is being drawn. Elements have classes, and the page's style sheet chooses their colours."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, style: str, title: str = "") -> None:
        """Draws a rectangle with round corners. `title` is shown when the pointer is over it."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        radius = min(2, width / 2, height / 2)
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:.1f}" '
            f'class="{style}">{tip}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """Draws a straight line between two points."""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def polyline(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draws straight lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{style}"/>')

    def dot(self, x: float, y: float, style: str, title: str = "") -> None:
        """Draws a filled dot. `title` is shown when the pointer is over it."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{style}">{tip}</circle>')

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Writes a line of text. `anchor` is SVG's text-anchor: the part of the line that lies at x."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>')

    def render(self, style: str) -> str:
        """The picture as an `svg` element of the class `style`."""
        return (
            f'<svg class="{style}" viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(self.label)}">{"".join(self.parts)}</svg>'
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def shortened(text: str, width: float) -> str:
    """`text`, cut at its left end to fit `width` pixels. The end of a layer's name is its most useful part."""
    fits = max(2, int(width / CHARACTER_WIDTH))
    return text if len(text) <= fits else "…" + text[1 - fits :]


def short_names(names: Iterable[str], width: float) -> dict[str, str]:
    """Each name as `shortened` cuts it to `width` pixels, but so that no two names look the same.

    Names with equal ends keep the part in which they differ. Where that does not fit they are numbered.
    """
    fits = max(2, int(width / CHARACTER_WIDTH))
    alike = dict[str, list[str]]()
    for name in dict.fromkeys(names):
        alike.setdefault(shortened(name, width), []).append(name)
    short, taken = dict[str, str](), set[str]()
    for cut, group in alike.items():
        texts = [cut] if len(group) == 1 else _cut_apart(group, fits)
        for name, text in zip(group, texts, strict=True):
            number, unique = 1, text
            while unique in taken:
                number += 1
                mark = f" #{number}"
                unique = text[: max(0, fits - len(mark))] + mark
            taken.add(unique)
            short[name] = unique
    return short


def _cut_apart(names: list[str], fits: int) -> list[str]:
    """Names with equal ends, cut to `fits` characters around the part in which they differ."""
    begin = _common_begin(names).rfind(".") + 1
    same_end = _common_begin([name[begin:][::-1] for name in names])
    texts = list[str]()
    for name in names:
        differs, end = name[begin : len(name) - len(same_end)], name[len(name) - len(same_end) :]
        head = ("…" if begin else "") + differs
        room = fits - len(head)
        texts.append((head + (end if len(end) <= room else "…" + end[len(end) - max(0, room - 1) :]))[:fits])
    return texts


def _common_begin(texts: list[str]) -> str:
    return commonprefix(texts)  # noqa: RUF071 - texts, not paths


def number_text(value: float, significant: int = 3) -> str:
    """A number with `significant` digits, without trailing zeros and never with an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_text(count: float) -> str:
    """Bytes in SI units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{number_text(count / size)} {unit}"
    return f"{number_text(count)} B"


def percent_text(share: float | None) -> str:
    """A share 0…1 in per cent, or a dash for None."""
    return "–" if share is None else f"{100 * share:.0f} %"


def seconds_text(seconds: float) -> str:
    """A duration for people, such as "2 min 5 s"."""
    if seconds >= 90:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    if seconds >= 1:
        return f"{number_text(seconds)} s"
    return f"{number_text(seconds * 1e3)} ms"
