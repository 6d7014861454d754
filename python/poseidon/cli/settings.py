"""Puts the table of options on a command: one flag per row, of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer

from poseidon.option_kinds import BYTES, Option
from poseidon.option_table import OPTIONS


def _help(option: Option) -> str:
    parts = [option.help]
    if option.choices:
        parts.append(f"One of {', '.join(option.choices)}.")
    if option.default not in (None, "", ()):
        default = _size(option.default) if option.kind is BYTES else option.default
        parts.append(f"Default: {default}.")
    return " ".join(parts)


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20}MiB" if size_bytes % (1 << 20) == 0 else f"{size_bytes >> 10}KiB"


def with_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options of the given names (none: all) to a command as flags.

    The command gets what was given on its command line as `command_line`, a dict of option name to text.
    """
    options = [option for option in OPTIONS if not names or option.name in names]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            given = {option.name: arguments.pop(option.name) for option in options}
            command_line = {name: text for name, text in given.items() if text is not None}
            return command(command_line=command_line, **arguments)

        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != "command_line"]
        added = [_parameter(option) for option in options]
        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return wrapper

    return decorate


def _parameter(option: Option) -> inspect.Parameter:
    panel = "Options of Poseidon (each also as POSEIDON_<NAME> or in poseidon.toml)"
    info = typer.Option(
        option.flag, help=_help(option), metavar=option.kind.metavar, show_default=False, rich_help_panel=panel
    )
    # Typer before 0.15 reads only the older spelling of an optional type on Python 3.10.
    kind = Annotated[Optional[str], info]  # noqa: UP045
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
