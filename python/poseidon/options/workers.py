"""What a launcher hands to its workers: options as variables, a fresh secret, a place to note failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from poseidon.dscp import default_classes
from poseidon.options import secret
from poseidon.options.sources import FAILURE_MARK_VARIABLE, check_together, first_given, read_config
from poseidon.options.table import BY_NAME, OPTIONS, Option


def resolve_option(name: str, environment: Mapping[str, str]) -> Any:
    """One option's value for processes that get this environment and read the same configuration file as this one."""
    value, _ = _workers_value(BY_NAME[name], environment, *read_config())
    return value


def is_given(name: str, environment: Mapping[str, str]) -> bool:
    """Whether such processes find a value for the option, so that it does not have its default."""
    _, source = _workers_value(BY_NAME[name], environment, *read_config())
    return source != "default"


def check_environment(environment: Mapping[str, str]) -> None:
    """InvalidArgument for what processes that get this environment, and read the same configuration file, refuse."""
    path, config = read_config()
    given = {option.name: _workers_value(option, environment, path, config) for option in OPTIONS}
    secret.choose(None, environment.get(secret.VARIABLE), *given["secret_file"])
    values = {name: value for name, (value, _) in given.items()}
    if values["priority_classes"] is None:
        values["priority_classes"] = default_classes(int(environment.get("WORLD_SIZE", 1)), bool(values["servers"]))
    check_together(values)


def _workers_value(
    option: Option, environment: Mapping[str, str], path: str, config: Mapping[str, Any]
) -> tuple[Any, str]:
    return first_given(
        option,
        ("environment", option.variable, environment.get(option.variable) or None),
        ("configuration file", f"{option.name} in {path}", config.get(option.name)),
    )


def to_environment(command_line: Mapping[str, Any]) -> dict[str, str]:
    """Checks options given on a command line and returns the variables that hand them to a worker.

    `command_line` maps names of options to text; None counts as not given. Raises InvalidArgument.
    """
    variables = {}
    for name, text in command_line.items():
        if text is not None:
            BY_NAME[name].read(text, BY_NAME[name].flag)
            variables[BY_NAME[name].variable] = str(text)
    return variables


def fresh_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that gives a run's workers a secret of their own; empty where their user has given them one.

    With dedicated servers, too: those know only what their user has given them.
    """
    if environment.get(secret.VARIABLE) or any(
        resolve_option(name, environment) for name in ("secret_file", "servers")
    ):
        return {}
    return {secret.VARIABLE: secret.fresh()}


def failure_mark() -> str | None:
    """The file in which `poseidon run` wants this process to note its failure; None: nobody asked."""
    return os.environ.get(FAILURE_MARK_VARIABLE) or None
