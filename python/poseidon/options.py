"""Every setting of Poseidon: one table, resolved in one place.

The value of an option is the first one given by: a keyword, the command line, the environment
(`POSEIDON_<NAME>`), the configuration file (`poseidon.toml` in the working directory, or the file
that `POSEIDON_CONFIG` names), the default. The commands of `poseidon` hand what their command line
says to the processes they start through the environment, so it also beats what was set there.

No other module reads `POSEIDON_*` or torchrun's variables.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.dscp import MOST_CLASSES, default_dscp
from poseidon.errors import InvalidArgument
from poseidon.option_kinds import AUTO, INTEGER, LIST, SECONDS, SIZE_OR_AUTO, TEXT, Option, choice, size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from poseidon._core import Options

CONFIG_VARIABLE = "POSEIDON_CONFIG"
CONFIG_FILE = "poseidon.toml"


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host and port.isdigit() and 1 <= int(port) <= 65535)


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


OPTIONS: tuple[Option, ...] = (
    Option(
        "interfaces",
        LIST,
        (),
        "Addresses or devices to listen on, all used at once; none: the one that leads to MASTER_ADDR.",
        "a list of addresses or devices separated by commas",
    ),
    Option(
        "servers",
        LIST,
        (),
        "Dedicated servers, host:port separated by commas; none: every worker hosts a shard.",
        "a list of host:port separated by commas",
        check=lambda value: all(_is_address(address) for address in value),
    ),
    choice(
        "transport",
        "auto",
        ("auto", "tcp", "shm", "ucx"),
        "What carries messages: shared memory within a host and TCP between hosts, or one of them for all.",
    ),
    Option(
        "server_cores",
        INTEGER,
        None,  # depends on the machine: _server_cores
        "Threads of each server, each with its own chunks; 0: the worker's thread; default: by this worker's cores.",
        "a whole number from 0 to 64",
        check=lambda value: 0 <= value <= 64,
    ),
    Option(
        "flows",
        INTEGER,
        1,
        "Connections from each worker to each server core.",
        "a whole number from 1 to 16",
        check=lambda value: 1 <= value <= 16,
    ),
    Option(
        "chunk_bytes",
        SIZE_OR_AUTO,
        256 << 10,
        "Largest piece of a tensor that one server core holds, or auto: measured at the start.",
        "auto, or a size of at least 64 bytes such as 65536, 512k or 2MiB",
        check=lambda value: value == AUTO or 64 <= value <= 1 << 34,
    ),
    size("small_bytes", 32 << 10, 0, "Tensors up to this size are grouped."),
    size("group_bytes", 1 << 20, 1, "A group of small tensors is closed when it reaches this size."),
    choice(
        "schedule",
        "wait_free",
        ("wait_free", "sequential"),
        "When a layer's exchange starts: with its gradient (wait-free), or after the whole backward pass.",
    ),
    choice(
        "partition",
        "balanced",
        ("balanced", "coarse"),
        "How tensors are spread over the shards: even chunks, or a whole tensor per shard.",
    ),
    choice(
        "aggregation",
        "streaming",
        ("streaming", "at_once", "wide"),
        "How servers add: while bytes arrive, when all parts are in, or with many threads on one array (baseline).",
    ),
    choice(
        "reduce_order",
        "rank",
        ("rank", "arrival"),
        "In which order the workers' parts are added: by rank (bitwise repeatable) or as they arrive.",
    ),
    choice(
        "assignment",
        "chunk",
        ("chunk", "worker"),
        "What a server core is responsible for: its chunks, or its workers (baseline).",
    ),
    Option(
        "priority_classes",
        INTEGER,
        2,
        "Flows between each pair of peers, by urgency; the network may tell them apart by their marks.",
        f"a whole number from 1 to {MOST_CLASSES}",
        check=lambda value: 1 <= value <= MOST_CLASSES,
    ),
    Option(
        "dscp",
        LIST,
        (),
        "Code points that mark the classes, the most urgent first; none: 46, 34, 26, …, and 0 for the last.",
        "a list of numbers from 0 to 63 separated by commas, one for each of priority_classes",
        check=lambda value: all(mark.isdigit() and int(mark) < 64 for mark in value),
    ),
    choice(
        "priority_order",
        "urgency",
        ("urgency", "fifo", "reverse", "random"),
        "What DistributedOptimizer sends first: what the next forward pass needs first, or a baseline.",
    ),
    Option(
        "priority_threshold",
        TEXT,
        AUTO,
        "Urgency above which a layer is in the first class; auto: searched in the first steps; coarse: all but linear.",
        "auto, coarse or a number from 0 to 1",
        check=lambda value: value in (AUTO, "coarse") or _is_share(value),
    ),
    choice(
        "scheme",
        "auto",
        ("auto", "ps", "sfb", "adam"),
        "How gradients are exchanged: the cheapest for each layer, or one scheme for all.",
    ),
    Option(
        "compute_threads",
        INTEGER,
        None,  # depends on the machine: _compute_threads
        "Threads that multiply factors; default: this worker's share of the cores, at most 8.",
        "a whole number from 1 to 256",
        check=lambda value: 1 <= value <= 256,
    ),
    Option(
        "timeout",
        SECONDS,
        300.0,
        "Seconds after which waiting for another process is an error.",
        "a number of seconds from 0.1 to 1000000",
        check=lambda value: math.isfinite(value) and 0.1 <= value <= 1e6,
    ),
    Option(
        "job",
        TEXT,
        "default",
        "Name of the job; workers of different jobs never talk to each other.",
        "1 to 64 letters, digits, '.', '_' or '-'",
        check=lambda value: re.fullmatch(r"[\w.-]{1,64}", value) is not None,
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}


def _number(name: str, default: Any, allowed: str, least: int, most: int = 2**31 - 1) -> Option:
    return Option(name, INTEGER, default, "", allowed, check=lambda value: least <= value <= most)


# What torchrun (or `poseidon run`) tells each worker; the variable is the name in capitals.
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
class Settings:
    """All options with their values, and this worker's place in the job.

    `sources` says for each name where its value came from: "keyword", "command line",
    "environment", "configuration file" or "default".
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
    timeout: float
    job: str
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    local_rank: int
    local_world_size: int
    use_agent_store: bool
    restart_count: int
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
            timeout=self.timeout,
        )


def resolve(**keywords: Any) -> Settings:
    """The settings of this process, from `keywords`, the environment, the configuration file and the defaults.

    A keyword that is None counts as not given. Raises InvalidArgument naming the value at fault.
    """
    return resolve_with({}, **keywords)


def resolve_with(command_line: Mapping[str, Any], **keywords: Any) -> Settings:
    """As `resolve`, for a command that also takes options on its own command line (names to values)."""
    _reject_unknown(keywords, (*BY_NAME, *_PLACE_NAMES), "keyword")
    _warn_of_unknown_variables()
    path, config = _read_config()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in _PLACE:
        values[option.name], sources[option.name] = _first(
            option,
            ("keyword", option.name, keywords.get(option.name)),
            ("environment", option.name.upper(), os.environ.get(option.name.upper()) or None),
        )
    _check_place(values, sources)
    for option in OPTIONS:
        values[option.name], sources[option.name] = _first(
            option,
            ("keyword", option.name, keywords.get(option.name)),
            ("command line", option.flag, command_line.get(option.name)),
            ("environment", option.variable, os.environ.get(option.variable) or None),
            ("configuration file", f"{option.name} in {path}", config.get(option.name)),
        )
    if values["compute_threads"] is None:
        values["compute_threads"] = _compute_threads(values["local_world_size"])
    if values["server_cores"] is None:
        values["server_cores"] = _server_cores(values)
    if values["dscp"] and len(values["dscp"]) != values["priority_classes"]:
        raise InvalidArgument(
            f"dscp has {len(values['dscp'])} code points and priority_classes is {values['priority_classes']}: give "
            "one for each class, or none"
        )
    values["use_agent_store"] = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or None
    values["restart_count"], _ = _first(_RESTART_COUNT, ("environment", "TORCHELASTIC_RESTART_COUNT", restarts))
    return Settings(**values, sources=sources)


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


def _check_place(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raises InvalidArgument unless rank, world size and the master's address make sense together."""

    def missing(name: str) -> bool:
        return sources[name] == "default"

    rank, world_size = values["rank"], values["world_size"]
    start = "start the workers with torchrun or `poseidon run`"
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
    known = (*(option.variable for option in OPTIONS), CONFIG_VARIABLE)
    for name in os.environ:
        if name.startswith("POSEIDON_") and name not in known:
            hint = _did_you_mean(name, known)
            warnings.warn(f"the environment variable {name} is not an option of Poseidon{hint}", stacklevel=4)


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ": known are " + ", ".join(known)
