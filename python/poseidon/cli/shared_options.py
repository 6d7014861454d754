"""Options that several commands have alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def shared_options(describe: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the parameters of `describe` as options, before its own.

    The command's first parameter gets what `describe` returns for them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(describe).parameters.values()
        _, *own = inspect.signature(command).parameters.values()
        hints = {**get_type_hints(describe, include_extras=True), **get_type_hints(command, include_extras=True)}

        def with_options(**given: Any) -> None:
            values = {parameter.name: given.pop(parameter.name) for parameter in shared}
            command(describe(**values), **given)

        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in (*shared, *own)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate
