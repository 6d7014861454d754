"""`poseidon options`: every option, with what this process would use."""

from __future__ import annotations

from typing import Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_table

EPILOG = "Example: poseidon options --json"


def options(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/options.md.")] = False,
    json: JsonFlag = False,
) -> None:
    """Print every option: its value here and now, where that comes from, its default and what it means."""
    # Help does not wait for the compiled core.
    from poseidon.options import OPTIONS, resolve
    from poseidon.options.page import markdown_page

    if markdown:
        print(markdown_page(), end="")
        return
    settings = resolve()
    if json:
        print_json(
            [
                {
                    "name": option.name,
                    "group": option.group,
                    "value": getattr(settings, option.name),
                    "source": settings.sources[option.name],
                    "default": option.default,
                    "help": option.help,
                    "choices": option.limits.choices,
                }
                for option in OPTIONS
            ]
        )
        return
    rows = [
        (option.name, getattr(settings, option.name), settings.sources[option.name], option.default_text, option.help)
        for option in OPTIONS
    ]
    print_table(("option", "value", "from", "default", "meaning"), rows)
