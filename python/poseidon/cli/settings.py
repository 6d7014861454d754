"""Puts the table of options on a command: one flag per row, of the same name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from poseidon.options import Option

    Command = TyperCommand
else:
    Command = object


class _WithFlags(Command):
    """A command with a flag for every option. Its function finds what was given, name to text, in `ctx.obj`.

    The table is read when the command is used or its help is asked for: it needs the compiled core.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *self._flags]

    def invoke(self, ctx: Any) -> Any:
        given = {flag.name: ctx.params.pop(flag.name) for flag in self._flags}
        ctx.obj = {name: text for name, text in given.items() if text is not None}
        return super().invoke(ctx)

    def options(self) -> Sequence[Option]:
        """The options that the command takes."""
        from poseidon.options import OPTIONS

        return OPTIONS

    @functools.cached_property
    def _flags(self) -> list[Any]:
        return _flags(self.options())


class RunCommand(_WithFlags, TyperCommand):
    """`poseidon run`."""


class ServerGroup(_WithFlags, TyperGroup):
    """`poseidon server`: a group that starts a server where no command of it is named."""

    def options(self) -> Sequence[Option]:
        return [option for option in super().options() if option.on_server]


def _flags(options: Sequence[Option]) -> list[Any]:
    """What Typer makes of a function with these options as keywords."""

    def take(**texts: Optional[str]) -> None:  # noqa: UP045
        pass

    take.__signature__ = inspect.Signature([_parameter(option) for option in options])  # type: ignore[attr-defined]
    take.__annotations__ = {option.name: _parameter(option).annotation for option in options}
    app = typer.Typer(add_completion=False)
    app.command()(take)
    return list(typer.main.get_command(app).params)


def _parameter(option: Option) -> inspect.Parameter:
    info = typer.Option(
        option.flag,
        help=_help(option),
        metavar=option.kind.metavar,
        show_default=False,
        rich_help_panel=_panel(option.group),
    )
    # Typer before 0.15 reads only the older spelling of an optional type on Python 3.10.
    kind = Annotated[Optional[str], info]  # noqa: UP045
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _panel(name: str) -> str:
    from poseidon.options import BASELINES_GROUP, GROUPS

    group = next(group for group in GROUPS if group.name == name)
    return f"{group.title}: {group.help}" if name == BASELINES_GROUP else group.title


def _help(option: Option) -> str:
    parts = [option.help]
    if option.choices:
        parts.append(f"One of {', '.join(option.limits.names)}.")
    if option.default_text:
        parts.append(f"Default: {option.default_text}.")
    return " ".join(parts)
