"""A group of commands whose module is imported only when one of them is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup


def lazy_group(module: str) -> type[TyperGroup]:
    """A class for `Typer(cls=…)` that takes its commands from the Typer object `app` in `module`.

    What a module of benchmarks imports is slow to load; `poseidon --help` does not wait for it.
    """

    class LazyGroup(TyperGroup):
        def _load(self) -> Any:
            # get_group, not get_command: an app with one command must stay a group.
            return typer.main.get_group(import_module(module).app)

        def list_commands(self, ctx: Any) -> list[str]:
            return self._load().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return self._load().get_command(ctx, cmd_name)

    return LazyGroup
