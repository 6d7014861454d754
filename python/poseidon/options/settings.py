"""The settings of a process: every option with its value, and this worker's place in the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from poseidon import _core
from poseidon.dscp import default_classes
from poseidon.options import secret
from poseidon.options.defaults import BY_MACHINE
from poseidon.options.interfaces import interfaces_of
from poseidon.options.kinds import KINDS, MOST_WHOLE, Limits
from poseidon.options.place import World, find_place
from poseidon.options.run_identity import run_of
from poseidon.options.sources import (
    FAILURE_MARK_VARIABLE,
    check_together,
    first_given,
    read_config,
    reject_unknown,
    warn_of_unknown_variables,
)
from poseidon.options.table import BY_NAME, CORE_OPTIONS, OPTIONS, PLACE, Option


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


# As torch waits for a rank that runs and is late. In silence, connecting and meeting, `timeout` holds.
_LATE_SECONDS = 1800.0

_RESTART_COUNT = Option("restart_count", KINDS["whole"], 0, "", limits=Limits(0, MOST_WHOLE))


@dataclass(frozen=True)
class Settings:
    """All options with their values, and this worker's place in the job: attributes of the options' names.

    `secrets`: one, or for a dedicated server one for each tenant; none where whoever can connect is let in.
    `use_agent_store`: torchrun's agent serves the store where ranks meet. `restart_count`: how often that agent has
    restarted the workers. `run`: what the launcher calls this run of the job; empty where it has no name for it.
    `sources` says for each name where its value came from: "keyword", "command line",
    "environment", "configuration file" or "default"; for the place also "torch.distributed", "MPI" or "Slurm".
    """

    values: Mapping[str, Any]
    secrets: tuple[str, ...] = field(default=(), repr=False)
    use_agent_store: bool = False
    restart_count: int = 0
    run: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.__dict__.update(self.values)

    if TYPE_CHECKING:  # the attributes are known when the table has been read

        def __getattr__(self, name: str) -> Any: ...

    def replace(self, **values: Any) -> Settings:
        """The same settings with other values of some options, which are not checked."""
        reject_unknown(values, tuple(self.values), "option")
        return replace(self, values={**self.values, **values})

    def core(self) -> _core.Options:
        """These settings as the compiled core takes them."""
        values = {option.name: option.kind.to_core(self.values[option.name]) for option in CORE_OPTIONS}
        values["interfaces"] = list(interfaces_of(self.values, self.sources))
        # Whoever sets `timeout` means it. Nobody else's rank 0 is at fault when it evaluates for ten minutes.
        late_s = values["timeout"] if self.sources.get("timeout", "default") != "default" else _LATE_SECONDS
        secret = self.secrets[0] if self.secrets else ""
        return _core.Options(**values, late_timeout=late_s, secret=secret, run=self.run)


def resolve(world: World | None = None, /, **keywords: Any) -> Settings:
    """The settings of this process, from `keywords`, the environment, the configuration file and the defaults.

    A keyword that is None counts as not given. With `world` this process's rank and the number of workers are from
    there. Raises InvalidArgument naming the value at fault.
    """
    return resolve_with({}, world, **keywords)


def resolve_with(command_line: Mapping[str, Any], world: World | None = None, /, **keywords: Any) -> Settings:
    """As `resolve`, for a command that also takes options on its own command line (names to values)."""
    reject_unknown(keywords, (*BY_NAME, *(option.name for option in PLACE), "secret"), "keyword")
    warn_of_unknown_variables()
    path, config = read_config()
    values, sources = find_place(keywords, world)
    for option in OPTIONS:
        values[option.name], sources[option.name] = first_given(
            option,
            ("keyword", option.name, keywords.get(option.name)),
            ("command line", option.flag, command_line.get(option.name)),
            ("environment", option.variable, os.environ.get(option.variable) or None),
            ("configuration file", f"{option.name} in {path}", config.get(option.name)),
        )
    for name, default in BY_MACHINE.items():
        if values[name] in (None, ()):
            values[name] = default(values)
    check_together(values)
    secrets, sources["secret"] = secret.choose(
        keywords.get("secret"), os.environ.get(secret.VARIABLE), values["secret_file"], sources["secret_file"]
    )
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or None
    restart_count, _ = first_given(_RESTART_COUNT, ("environment", "TORCHELASTIC_RESTART_COUNT", restarts))
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Settings(values, secrets, agent_store, restart_count, run_of(sources, os.environ), sources)
