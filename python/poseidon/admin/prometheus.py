"""Prometheus's text format: https://prometheus.io/docs/instrumenting/exposition_formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
