"""Every setting of Poseidon: one table, resolved in one place.

The value of an option is the first one given by: a keyword, the command line, the environment
(`POSEIDON_<NAME>`), the configuration file (`poseidon.toml` in the working directory, or the file
that `POSEIDON_CONFIG` names), the default. The commands of `poseidon` hand what their command line
says to the processes they start through the environment, so it also beats what was set there.

The secret itself (`secret`, POSEIDON_SECRET) is no row of the table: it has no flag and is in no configuration file.

No other module reads `POSEIDON_*` or the variables of launchers (torchrun, Slurm).
"""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon import secret
from poseidon.dscp import default_dscp
from poseidon.errors import InvalidArgument
from poseidon.option_kinds import AUTO, INTEGER, TEXT, Option
from poseidon.option_table import OPTIONS
from poseidon.slurm import slurm_place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from poseidon._core import Options

CONFIG_VARIABLE = "POSEIDON_CONFIG"
CONFIG_FILE = "poseidon.toml"
FAILURE_MARK_VARIABLE = "POSEIDON_FAILURE_MARK"

BY_NAME = {option.name: option for option in OPTIONS}


def _number(name: str, default: Any, allowed: str, least: int, most: int = 2**31 - 1) -> Option:
    return Option(name, INTEGER, default, "", allowed, check=lambda value: least <= value <= most)


# What torchrun (or `poseidon run`) tells each worker; the variable is the name in capitals. Slurm has others.
_PLACE = (
    _number("rank", 0, "a whole number, 0 or more", 0),
    _number("world_size", 1, "a whole number, 1 or more", 1),
    Option("master_addr", TEXT, "127.0.0.1", "", "the address of rank 0's machine", check=bool),
    _number("master_port", 29500, "a port from 1 to 65535", 1, 65535),
    _number("local_rank", 0, "a whole number, 0 or more", 0),
    _number("local_world_size", 1, "a whole number, 1 or more", 1),
)
_RESTART_COUNT = _number("restart_count", 0, "how often torchrun's agent restarted the workers", 0)
_PLACE_NAMES = tuple(option.name for option in _PLACE)


@dataclass(frozen=True)
class World:
    """This process's place in a job that torch.distributed has formed before."""

    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 29500


@dataclass(frozen=True)
class Settings:
    """All options with their values, and this worker's place in the job.

    `sources` says for each name where its value came from: "keyword", "command line",
    "environment", "configuration file" or "default"; for the place also "torch.distributed" or "Slurm".
    """

    interfaces: tuple[str, ...]
    servers: tuple[str, ...]
    transport: str
    server_cores: int
    flows: int
    chunk_bytes: int | str
    small_bytes: int
    group_bytes: int
    schedule: str
    partition: str
    aggregation: str
    reduce_order: str
    assignment: str
    priority_classes: int
    dscp: tuple[str, ...]
    priority_order: str
    priority_threshold: str
    scheme: str
    compute_threads: int
    stragglers: str
    straggler_factor: float
    straggler_steps: int
    consistency: str
    staleness: int
    on_failure: str
    min_workers: int
    memory_limit: int
    server_memory: int
    max_jobs: int
    checkpoint_dir: str
    checkpoint_every: int
    checkpoint_keep: int
    flight_record: str
    timeout: float
    secret_file: str
    tls: str
    job: str
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    local_rank: int
    local_world_size: int
    use_agent_store: bool
    restart_count: int
    # One, or for a server that stands alone one for each tenant; none: whoever can connect is let in.
    secrets: tuple[str, ...] = field(default=(), repr=False)
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def core(self) -> Options:
        """These settings as the compiled core takes them."""
        from poseidon._core import Options

        return Options(
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            job=self.job,
            secret=self.secrets[0] if self.secrets else "",
            tls=self.tls,
            interfaces=list(self.interfaces),
            servers=list(self.servers),
            transport=self.transport,
            server_cores=self.server_cores,
            flows=self.flows,
            chunk_bytes=0 if self.chunk_bytes == AUTO else self.chunk_bytes,
            small_bytes=self.small_bytes,
            group_bytes=self.group_bytes,
            schedule=self.schedule,
            partition=self.partition,
            aggregation=self.aggregation,
            reduce_order=self.reduce_order,
            assignment=self.assignment,
            priority_classes=self.priority_classes,
            dscp=[int(mark) for mark in self.dscp] or list(default_dscp(self.priority_classes)),
            compute_threads=self.compute_threads,
            stragglers=self.stragglers,
            straggler_factor=self.straggler_factor,
            straggler_steps=self.straggler_steps,
            consistency=self.consistency,
            staleness=self.staleness,
            on_failure=self.on_failure,
            min_workers=self.min_workers,
            memory_limit=self.memory_limit,
            server_memory=self.server_memory,
            max_jobs=self.max_jobs,
            checkpoint_dir=self.checkpoint_dir,
            checkpoint_every=self.checkpoint_every,
            checkpoint_keep=self.checkpoint_keep,
            flight_record="" if self.flight_record == "off" else self.flight_record,
            timeout=self.timeout,
        )


def resolve(world: World | None = None, /, **keywords: Any) -> Settings:
    """The settings of this process, from `keywords`, the environment, the configuration file and the defaults.

    A keyword that is None counts as not given. With `world` this process's rank and the number of workers are from
    there. Raises InvalidArgument naming the value at fault.
    """
    return resolve_with({}, world, **keywords)


def resolve_with(command_line: Mapping[str, Any], world: World | None = None, /, **keywords: Any) -> Settings:
    """As `resolve`, for a command that also takes options on its own command line (names to values)."""
    _reject_unknown(keywords, (*BY_NAME, *_PLACE_NAMES, "secret"), "keyword")
    _warn_of_unknown_variables()
    path, config = _read_config()
    values, sources = _place(keywords, world)
    for option in OPTIONS:
        values[option.name], sources[option.name] = _first(
            option,
            ("keyword", option.name, keywords.get(option.name)),
            ("command line", option.flag, command_line.get(option.name)),
            ("environment", option.variable, os.environ.get(option.variable) or None),
            ("configuration file", f"{option.name} in {path}", config.get(option.name)),
        )
    if values["flight_record"] is None:
        values["flight_record"] = tempfile.gettempdir()
    values["secrets"], sources["secret"] = secret.choose(
        keywords.get("secret"), os.environ.get(secret.VARIABLE), values["secret_file"], sources["secret_file"]
    )
    if values["compute_threads"] is None:
        values["compute_threads"] = _compute_threads(values["local_world_size"])
    if values["server_cores"] is None:
        values["server_cores"] = _server_cores(values)
    _check_together(values)
    values["use_agent_store"] = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or None
    values["restart_count"], _ = _first(_RESTART_COUNT, ("environment", "TORCHELASTIC_RESTART_COUNT", restarts))
    return Settings(**values, sources=sources)


def resolve_option(name: str, environment: Mapping[str, str]) -> Any:
    """One option's value for processes that get this environment and read the same configuration file as this one."""
    value, _ = _workers_value(BY_NAME[name], environment, *_read_config())
    return value


def check_environment(environment: Mapping[str, str]) -> None:
    """InvalidArgument for what processes that get this environment, and read the same configuration file, refuse."""
    path, config = _read_config()
    values = {option.name: _workers_value(option, environment, path, config) for option in OPTIONS}
    secret.choose(None, environment.get(secret.VARIABLE), *values["secret_file"])
    _check_together({name: value for name, (value, _) in values.items()})


def _workers_value(
    option: Option, environment: Mapping[str, str], path: str, config: Mapping[str, Any]
) -> tuple[Any, str]:
    return _first(
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


def available_cpu_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _compute_threads(local_world_size: int) -> int:
    return min(8, max(1, available_cpu_count() // local_world_size))


def _server_cores(values: Mapping[str, Any]) -> int:
    # The framework computes on the same cores: a quarter of them moves gradients. A worker with few needs a core
    # beside its own thread where the kernel does the copying; in shared memory two would only compete for the cache.
    cores = available_cpu_count() // values["local_world_size"]
    on_one_host = values["transport"] == "shm" or (
        values["transport"] == "auto" and values["local_world_size"] == values["world_size"]
    )
    return min(4, max(cores // 4, 0 if on_one_host or cores == 0 else 1))


def _first(option: Option, *givers: tuple[str, str, Any]) -> tuple[Any, str]:
    """The value of the first giver (source, how to name it in an error, value) that gives one."""
    for source, origin, value in givers:
        if value is not None:
            return option.read(value, origin), source
    return option.default, "default"


def _check_together(values: Mapping[str, Any]) -> None:
    """Raises InvalidArgument where options that are right alone do not go together."""
    if values["dscp"] and len(values["dscp"]) != values["priority_classes"]:
        raise InvalidArgument(
            f"dscp has {len(values['dscp'])} code points and priority_classes is {values['priority_classes']}: give "
            "one for each class, or none"
        )


def _place(keywords: Mapping[str, Any], world: World | None) -> tuple[dict[str, Any], dict[str, str]]:
    """This worker's place in the job, and where each value came from."""
    alone = world is None and not any(
        keywords.get(name) is not None or os.environ.get(name.upper()) for name in ("rank", "world_size")
    )
    slurm = slurm_place(os.environ) if alone else {}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in _PLACE:
        name, variable = option.name, option.name.upper()
        values[name], sources[name] = _first(
            option,
            ("keyword", name, keywords.get(name)),
            ("environment", variable, os.environ.get(variable) or None),
            ("torch.distributed", name, getattr(world, name, None)),
            ("Slurm", *slurm.get(name, (name, None))),
        )
    if world is not None:
        _check_world(values, sources, world)
    _check_place(values, sources)
    return values, sources


def _check_world(values: Mapping[str, Any], sources: Mapping[str, str], world: World) -> None:
    """Raises InvalidArgument where a keyword or variable contradicts torch.distributed."""
    for name, ours in (("rank", world.rank), ("world_size", world.world_size)):
        if values[name] != ours:
            giver = name if sources[name] == "keyword" else name.upper()
            raise InvalidArgument(
                f"{giver} is {values[name]} while torch.distributed is initialized as rank {world.rank} of "
                f"{world.world_size}: give both the same, or leave {giver} out"
            )


def _check_place(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raises InvalidArgument unless rank, world size and the master's address make sense together."""

    def missing(name: str) -> bool:
        return sources[name] == "default"

    rank, world_size = values["rank"], values["world_size"]
    start = "start the workers with torchrun, srun or `poseidon run`"
    if missing("rank") != missing("world_size"):
        lacks, has = ("RANK", "WORLD_SIZE") if missing("rank") else ("WORLD_SIZE", "RANK")
        raise InvalidArgument(
            f"{lacks} is missing while {has} is {values[has.lower()]}: set both or neither, or {start}"
        )
    if rank >= world_size:
        raise InvalidArgument(
            f"RANK is {rank} while WORLD_SIZE is {world_size}: it must be from 0 to {world_size - 1}; {start}"
        )
    for name, meaning in (("master_addr", "the address of rank 0's machine"), ("master_port", "a free port there")):
        if world_size > 1 and missing(name):
            raise InvalidArgument(
                f"{name.upper()} is missing while WORLD_SIZE is {world_size}: set it to {meaning}, or {start}"
            )
    local_rank, local_world_size = values["local_rank"], values["local_world_size"]
    if not missing("local_world_size") and not local_rank < local_world_size <= world_size:
        raise InvalidArgument(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE is {local_world_size} and WORLD_SIZE is {world_size}: "
            f"they must satisfy LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE; {start}"
        )


def _read_config() -> tuple[str, dict[str, Any]]:
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
    _reject_unknown(content, tuple(BY_NAME), f"option in {path}")
    return str(path), content


def _reject_unknown(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidArgument(f"{name!r} is no known {what}{_did_you_mean(name, known)}")


def _warn_of_unknown_variables() -> None:
    known = (*(option.variable for option in OPTIONS), CONFIG_VARIABLE, FAILURE_MARK_VARIABLE, secret.VARIABLE)
    for name in os.environ:
        if name.startswith("POSEIDON_") and name not in known:
            hint = _did_you_mean(name, known)
            warnings.warn(f"the environment variable {name} is not an option of Poseidon{hint}", stacklevel=4)


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ": known are " + ", ".join(known)
