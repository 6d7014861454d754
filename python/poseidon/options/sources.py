"""Where the values of options come from: keywords, the command line, the environment, the configuration file.

Only this package reads `POSEIDON_*` and the variables of launchers (torchrun, MPI, Slurm).
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.options.run_identity import VARIABLE as RUN_VARIABLE
from poseidon.options.secret import VARIABLE as SECRET_VARIABLE
from poseidon.options.table import BY_NAME, OPTIONS, Option

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "POSEIDON_CONFIG"
CONFIG_FILE = "poseidon.toml"
FAILURE_MARK_VARIABLE = "POSEIDON_FAILURE_MARK"


def first_given(option: Option, *givers: tuple[str, str, Any]) -> tuple[Any, str]:
    """The value of the first giver (source, how to name it in an error, value) that gives one."""
    for source, origin, value in givers:
        if value is not None:
            return option.read(value, origin), source
    return option.default, "default"


def check_together(values: Mapping[str, Any]) -> None:
    """Raises InvalidArgument where options that are right alone do not go together."""
    if values["dscp"] and len(values["dscp"]) != values["priority_classes"]:
        raise InvalidArgument(
            f"dscp has {len(values['dscp'])} code points and priority_classes is {values['priority_classes']}: give "
            "one for each class, or none"
        )


def read_config() -> tuple[str, dict[str, Any]]:
    """The configuration file's path and content; empty when there is none."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or CONFIG_FILE)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not named:
            return str(path), {}
        raise InvalidArgument(f"{CONFIG_VARIABLE} is {named!r}, which does not exist: correct or unset it") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"the configuration file {path} cannot be read: {error}; correct or remove it") from None
    reject_unknown(content, tuple(BY_NAME), f"option in {path}")
    return str(path), content


def reject_unknown(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raises InvalidArgument for a name that is not known."""
    for name in given:
        if name not in known:
            raise InvalidArgument(f"{name!r} is no known {what}{_did_you_mean(name, known)}")


def warn_of_unknown_variables() -> None:
    """Warns of variables that look like options and are none."""
    known = (
        *(option.variable for option in OPTIONS),
        CONFIG_VARIABLE,
        FAILURE_MARK_VARIABLE,
        RUN_VARIABLE,
        SECRET_VARIABLE,
    )
    for name in os.environ:
        if name.startswith("POSEIDON_") and name not in known:
            hint = _did_you_mean(name, known)
            warnings.warn(f"the environment variable {name} is not an option of Poseidon{hint}", stacklevel=4)


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ": known are " + ", ".join(known)
