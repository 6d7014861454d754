"""Reads clusters from `cluster.toml` and from options of the same names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.planner.cluster import MOST_RATE, ClusterSpec, InvalidCluster
from poseidon.rates import parse_rate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "hosts": ((int,), "a whole number"),
    "link": ((str,), 'a rate such as "10gbit"'),
    "workers_per_host": ((int,), "a whole number"),
    "servers": ((int,), "a whole number"),
    "racks": ((int,), "a whole number"),
    "oversubscription": ((int, float), "a number"),
    "rack_labels": ((bool,), "true or false"),
    "strict_priority": ((bool,), "true or false"),
    "mtu": ((int,), "a whole number of bytes"),
    "latency_ms": ((int, float), "a number of milliseconds"),
    "host_memory": ((int, float), "a number of GB per second"),
    "products": ((int, float), "a number of 10⁹ multiply-adds a second"),
    "slowest": ((int, float), "a number of times"),
    "price": ((int, float), "a number of dollars for a host and hour"),
}


_OTHERWISE_NAMED = ("link", "latency_ms", "host_memory", "products")  # in a ClusterSpec, which has other units


@dataclass(frozen=True)
class Setting:
    """A value and where it was given, such as "--hosts" or "cluster.toml, line 3"."""

    value: Any
    origin: str


def read_settings(path: Path) -> dict[str, Setting]:
    """The settings of a cluster file. Raises InvalidArgument, naming the line, for what is no setting or no value."""
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"the cluster file {path} cannot be read: {why}") from None
    given = {}
    for name, value in content.items():
        origin = f"{path}, line {_line_of(name, text)}"
        if name not in _KINDS:
            raise InvalidArgument(f"{origin}: {name!r} is no setting of a cluster: known are {', '.join(_KINDS)}")
        given[name] = Setting(value, origin)
    return given


def make_cluster(given: Mapping[str, Setting]) -> ClusterSpec:
    """The cluster of these settings; others have their defaults. Raises InvalidArgument that names what is wrong."""
    for name in ("hosts", "link"):
        if name not in given:
            raise InvalidArgument(f"{name} is missing: give --{name}, or {name} in a cluster file with --cluster")
    for name, setting in given.items():
        kinds, words = _KINDS[name]
        if not isinstance(setting.value, kinds) or (isinstance(setting.value, bool) and bool not in kinds):
            raise InvalidArgument(f"{setting.origin}: {name} is {setting.value!r}: it must be {words}")
    values = {name: setting.value for name, setting in given.items()}
    link, latency_ms, memory, products = (values.pop(name, None) for name in _OTHERWISE_NAMED)
    try:
        rate = parse_rate(link, MOST_RATE)
    except InvalidArgument as error:
        raise InvalidArgument(f"{given['link'].origin}: {error}") from None
    if latency_ms is not None:
        values["latency_s"] = latency_ms / 1e3
    if memory is not None:
        values["memory_bytes_per_s"] = memory * 1e9
    if products is not None:
        values["products_per_s"] = products * 1e9
    try:
        return ClusterSpec(bits_per_second=rate, **values)
    except InvalidCluster as error:
        at_fault = given.get(error.field)
        raise InvalidArgument(f"{at_fault.origin}: {error}" if at_fault else str(error)) from None


def _line_of(name: str, text: str) -> int:
    """The line that sets a top-level name, or opens its table."""
    key = re.escape(name)
    pattern = re.compile(rf"""\s*(\[\[?\s*)?["']?{key}["']?\s*[.=\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)
