"""`poseidon features`: what may be combined, and the page docs/features.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_table, wrapped

if TYPE_CHECKING:
    from poseidon.adapter.features import Feature

EPILOG = "Example: poseidon features --json"

_HEAD = """\
# What may be combined

`poseidon features --markdown` makes this page from the table of features: that of the core,
[include/poseidon/features.def](../include/poseidon/features.def), and that of Python, `FEATURES` in
`python/poseidon/adapter/features.py`. Do not edit it. [Decision 63](decisions/0063-features.md) explains the table.

A running job has properties. A feature needs some of them, and breaks others. Two features exclude each other if one
needs what the other breaks. The first call at which both are known raises `InvalidArgument`, on all ranks, before
anything is exchanged. All other features may be combined. Which scheme, wire format and dtype go together for a layer
is on other pages: [schemes](choice.md), [lossy schemes](lossy.md), [wire formats](wire-formats.md).

## Properties
"""


def features(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/features.md.")] = False,
    json: JsonFlag = False,
) -> None:
    """Print every feature of a job, those that it excludes, and what to do instead."""
    # Help does not wait for the compiled core.
    from poseidon.adapter.features import FEATURES

    if markdown:
        print(markdown_page(), end="")
    elif json:
        print_json(
            [
                {
                    "name": one.name,
                    "written": _written(one),
                    "needs": dict(one.needs),
                    "breaks": dict(one.breaks),
                    "excludes": [other.name for other, _ in _excluded(one)],
                    "remedy": one.remedy,
                }
                for one in FEATURES.values()
            ]
        )
    else:
        rows = [
            (_written(one), ", ".join(_written(other) for other, _ in _excluded(one)), one.remedy)
            for one in FEATURES.values()
        ]
        print_table(("feature", "excludes", "instead"), rows)


def markdown_page() -> str:
    """The whole page, which ends with a line break."""
    from poseidon.adapter.features import FEATURES, PROPERTIES

    parts = [_HEAD, "".join(wrapped(f"- `{name}`: {text}") for name, text in PROPERTIES.items()), "## Features\n"]
    for one in FEATURES.values():
        parts += _section(one)
    return "\n".join(parts)


def _section(one: Feature) -> Iterator[str]:
    yield f"### {_written(one).replace('…', 'X')}\n"
    clauses = [
        *(f"- needs `{name}`: it {why}." for name, why in one.needs.items()),
        *(f"- breaks `{name}`: it {why}." for name, why in one.breaks.items()),
        *(f"- excludes {_written(other)} (`{name}`)." for other, name in _excluded(one)),
    ]
    yield "".join(map(wrapped, clauses))
    yield wrapped(f"Instead: {one.remedy}.")


def _excluded(one: Feature) -> Iterator[tuple[Feature, str]]:
    """The features that this one excludes, each with the property because of which it does."""
    from poseidon.adapter.features import FEATURES

    for other in FEATURES.values():
        shared = {*one.needs} & {*other.breaks} or {*one.breaks} & {*other.needs}
        if shared:
            yield other, min(shared)


def _written(one: Feature) -> str:
    return one.written.format("…")
