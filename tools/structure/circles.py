"""Circles: files, or folders beside each other, that need one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from structure.edges import Edge
from structure.rooms import parting


def check_circles(edges: Iterable[Edge]) -> Iterator[str]:
    """The circles in every folder.

    An edge counts in the folder where its two paths part, between the two neighbours there: a file may be one, and so
    may a folder with all that is in it. Two folders that use each other are thus a circle, too.
    """
    by_folder: dict[Path, dict[str, dict[str, Edge]]] = defaultdict(lambda: defaultdict(dict))
    for edge in edges:
        level = parting(edge.source.parts, edge.target.parts)
        folder = Path(*edge.source.parts[:level])
        by_folder[folder][edge.source.parts[level]].setdefault(edge.target.parts[level], edge)
    for folder in sorted(by_folder):
        for circle in circles(by_folder[folder]):
            steps = zip(circle, [*circle[1:], circle[0]], strict=True)
            places = ", ".join(str(by_folder[folder][source][target]) for source, target in steps)
            yield f"{folder}: circle {' → '.join([*circle, circle[0]])} ({places})"


def circles(graph: Mapping[str, Mapping[str, Edge]]) -> Iterator[list[str]]:
    """One shortest circle through each knot of a graph: through its alphabetically first node."""
    left = set(graph)
    for start in sorted(graph):
        circle = _shortest_circle(graph, start, left)
        if circle:
            yield circle
            left -= {node for node in left if _reaches(graph, start, node) and _reaches(graph, node, start)}


def _shortest_circle(graph: Mapping[str, Mapping[str, Edge]], start: str, within: set[str]) -> list[str] | None:
    if start not in within:
        return None
    paths = [[start]]
    seen: set[str] = set()
    for path in paths:
        for target in sorted(graph.get(path[-1], {})):
            if target == start:
                return path
            if target in within and target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def _reaches(graph: Mapping[str, Mapping[str, Edge]], start: str, goal: str) -> bool:
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node == goal:
            return True
        fresh = set(graph.get(node, {})) - seen
        seen |= fresh
        waiting.extend(fresh)
    return False
