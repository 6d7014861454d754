"""Prometheus's text format: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """What many things have: `field` is its name in their figures."""

    name: str
    kind: str
    field: str
    help: str


def families(prefix: str, metrics: Iterable[Metric], things: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """The lines of these metrics of all things, each of which is its labels and its figures. None is left out."""
    for metric in metrics:
        samples = [(labelled, figures[metric.field]) for labelled, figures in things]
        known = [sample for sample in samples if sample[1] is not None]
        yield from family(f"{prefix}_{metric.name}", metric.kind, metric.help, known)


def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    """The lines of one metric. Each sample is what `labels` makes, and a value."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labelled, value in samples:
        yield f"{name}{labelled} {int(value) if isinstance(value, bool) else value}"


def labels(**values: object) -> str:
    """The labels of a sample."""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
