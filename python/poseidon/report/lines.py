"""Lines of one quantity over the number of nodes, on axes that double from mark to mark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.report.svg import Canvas, Scale

HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 250.0, 12, 40, 36, 12


@dataclass(frozen=True)
class Line:
    """`points`: nodes and speed-up. `style`: a class of the style sheet that colours lines."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def speedup_chart(lines: Sequence[Line], said: Sequence[tuple[float, float, str]], width: float, label: str) -> Canvas:
    """Speed-ups by number of nodes, a dashed line for linear scaling, and what somebody said as dots with a text."""
    most = max(nodes for line in lines for nodes, _ in line.points)
    least = min(1.0, *(value for line in lines for _, value in line.points))
    canvas = Canvas(width, HEIGHT, label)
    across = Scale(0, math.log2(most), LEFT, width - RIGHT)
    up = Scale(math.log2(least), math.log2(most), HEIGHT - BOTTOM, TOP)
    for power in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1):
        canvas.line(LEFT, up(power), width - RIGHT, up(power), "grid")
        canvas.text(LEFT - 8, up(power) + 4, f"{2**power:g}", "tick", "end")
    for power in range(math.floor(math.log2(most)) + 1):
        canvas.text(across(power), HEIGHT - BOTTOM + 18, f"{2**power}", "tick", "middle")
    canvas.text((LEFT + width - RIGHT) / 2, HEIGHT - 4, "nodes", "tick", "middle")
    canvas.line(across(0), up(0), across(math.log2(most)), up(math.log2(most)), "limit")
    for line in lines:
        canvas.polyline([(across(math.log2(x)), up(math.log2(y))) for x, y in line.points], f"line {line.style}")
        for x, y in line.points:
            canvas.dot(across(math.log2(x)), up(math.log2(y)), line.style, f"{line.name}, {x:g} nodes: {y:.2f}")
    for x, y, text in said:
        canvas.dot(across(math.log2(x)), up(math.log2(y)), "said", text)
    return canvas
