"""How long an urgent tensor takes while a bulk tensor comes from another server (Geryon Figure 5, as a measurement).

One worker pulls both, each whole from a server with a host of its own, through the one port of the worker's host. Each
server sends in the best order that it can know; only the network can let the urgent one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from poseidon.bench.hosts.fleet import Fleet, Place, places_of, start_fleet
from poseidon.bench.hosts.measures import FLOAT_BYTES
from poseidon.bench.hosts.server import START_SECONDS, UNCODED, settings_on, start_servers
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.rates import parse_rate
from poseidon.testbed import Testbed

_SERVER_COUNT = 2
_SETTLE_SECONDS = 0.3  # for the queues of the network to run empty
_CLASS_COUNTS = (1, 2)
_BULK, _URGENT = 0, 1  # layers, in the order in which partition=coarse gives them to the servers


@dataclass(frozen=True)
class UrgentConfig:
    """What one run measures.

    `link` is the rate of every port, such as "100mbit". There are `repeat_count` pulls of each kind. `congestion` and
    `queue_ms` are those of `Testbed`.
    """

    link: str
    urgent_bytes: int
    bulk_bytes: int
    repeat_count: int
    timeout_seconds: float = 300.0
    congestion: str = "reno"
    queue_ms: float | None = None

    @property
    def urgent_seconds(self) -> float:
        """The time that the urgent tensor takes at the port's rate."""
        return 8 * self.urgent_bytes / parse_rate(self.link)


@dataclass(frozen=True)
class Delay:
    """One combination of switches and classes.

    `honour_dscp` says whether the switches honour code points. There are `classes` flows between each pair of peers.
    With one only the end hosts order what they send. `alone_seconds` and `loaded_seconds` have the time until the
    urgent tensor is in, by repeat, without and with the bulk tensor under way.
    """

    honour_dscp: bool
    classes: int
    alone_seconds: list[float]
    loaded_seconds: list[float]

    @property
    def ratio(self) -> float:
        """Median time with the bulk tensor under way over the median time alone."""
        return median(self.loaded_seconds) / median(self.alone_seconds)


@dataclass(frozen=True)
class UrgentResult:
    """A whole run."""

    link: str
    urgent_bytes: int
    bulk_bytes: int
    delays: list[Delay]
    congestion: str = "reno"
    queue_ms: float | None = None

    def delay(self, honour_dscp: bool, classes: int) -> Delay:
        """Returns the measurement of one combination."""
        return next(one for one in self.delays if (one.honour_dscp, one.classes) == (honour_dscp, classes))

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        document = asdict(self)
        for entry, delay in zip(document["delays"], self.delays, strict=True):
            entry["ratio"] = delay.ratio
        return document


class UrgentHost:
    """The worker that pulls. Lives in its host's process and network namespace."""

    def __init__(
        self, config: UrgentConfig, place: Place, servers: tuple[str, ...], options: dict[str, Any], classes: int
    ) -> None:
        from poseidon._core import Client, Layer

        settings = settings_on(
            place,
            options,
            rank=0,
            world_size=1,
            master_addr="127.0.0.1",
            master_port=1,  # unused: one worker meets nobody
            servers=servers,
            timeout=config.timeout_seconds,
        )
        self._lead_seconds = config.urgent_seconds
        sizes = (config.bulk_bytes, config.urgent_bytes)
        self._values = [np.full(size // FLOAT_BYTES, 1 + layer, np.float32) for layer, size in enumerate(sizes)]
        self._received = [np.empty_like(value) for value in self._values]
        self._client = Client.connect(settings.core())
        names = ("bulk", "urgent")
        self._first, plan = self._client.add_layers(
            [
                Layer(name, "float32", value.size, scheme="ps", stored=True)
                for name, value in zip(names, self._values, strict=True)
            ]
        )
        placed = [[chunk.server for chunk in unit.chunks] for unit in plan.units]
        if placed != [[0], [1]]:
            raise PoseidonError(f"the tensors lie on servers {placed}: each must lie whole on a server of its own")
        self._client.set_priorities(self._first, [0.0, 1.0], [classes - 1, 0], 0.5)
        for layer, value in enumerate(self._values):
            self._client.assign(self._first + layer, value)
            self._client.wait(self._first + layer)

    def ready(self) -> None:
        """Does nothing. The call returns when the worker has been built."""

    def pull(self, bulk: bool) -> float:
        """Returns the seconds until the urgent tensor is in, with the bulk tensor under way or alone."""
        time.sleep(_SETTLE_SECONDS)
        if bulk:
            self._begin(_BULK)
            time.sleep(self._lead_seconds)  # its packets fill the worker's port
            if self._client.done(self._first + _BULK):
                raise PoseidonError("the bulk tensor was in before the urgent one was asked for: make it larger")
        start = time.monotonic()
        self._begin(_URGENT)
        self._end(_URGENT)
        seconds = time.monotonic() - start
        if bulk:
            self._end(_BULK)
        return seconds

    def close(self) -> None:
        """Ends the connections to the servers."""
        self._client.shutdown()

    def _begin(self, layer: int) -> None:
        self._received[layer].fill(0)
        self._client.pull(self._first + layer, self._received[layer])

    def _end(self, layer: int) -> None:
        self._client.wait(self._first + layer)
        if not np.array_equal(self._received[layer], self._values[layer]):
            raise PoseidonError("a pulled tensor is not what the server was given")


def run_urgent(config: UrgentConfig, progress: Callable[[str, int, int], None] | None = None) -> UrgentResult:
    """Measures switches that honour code points and ones that ignore them, each with one and with two classes.

    Needs root. `progress(what, done, in all)` is called before every combination. Raises PoseidonError.
    """
    if min(config.urgent_bytes, config.bulk_bytes) < FLOAT_BYTES or config.repeat_count < 1:
        raise InvalidArgument("the tensors need at least 4 bytes each, and repeats must be at least 1")
    from poseidon import _core  # noqa: F401  # once, before the processes are forked

    delays: list[Delay] = []
    for honour_dscp in (True, False):
        testbed = Testbed(
            _SERVER_COUNT + 1,
            config.link,
            priorities=max(_CLASS_COUNTS),
            honour_dscp=honour_dscp,
            congestion=config.congestion,
            queue_ms=config.queue_ms,
        )
        with testbed:
            for classes in _CLASS_COUNTS:
                if progress is not None:
                    what = f"switches {'honour' if honour_dscp else 'ignore'}, {classes} class{'es' * (classes > 1)}"
                    progress(what, len(delays), 2 * len(_CLASS_COUNTS))
                delays.append(_measure(config, places_of(testbed), honour_dscp, classes))
    return UrgentResult(config.link, config.urgent_bytes, config.bulk_bytes, delays, config.congestion, config.queue_ms)


def _measure(config: UrgentConfig, places: Sequence[Place], honour_dscp: bool, classes: int) -> Delay:
    """Alone and loaded take turns, so that a drift of the machine meets both."""
    alone, loaded = [], []
    with _worker(config, places, classes) as worker:
        limit = config.timeout_seconds
        for _ in range(config.repeat_count):
            alone += worker.call_same("pull", False, timeout_seconds=limit)
            loaded += worker.call_same("pull", True, timeout_seconds=limit)
    return Delay(honour_dscp, classes, alone, loaded)


@contextmanager
def _worker(config: UrgentConfig, places: Sequence[Place], classes: int) -> Iterator[Fleet]:
    """The servers on the first hosts and the worker on the last."""
    options = {
        **UNCODED,
        "transport": "tcp",
        "partition": "coarse",
        "priority_classes": str(classes),
        "server_cores": "1",
    }
    *hosts, place = places
    limit = config.timeout_seconds
    with ExitStack() as stack:
        servers, addresses = start_servers(hosts, options, limit, stack)
        worker = stack.enter_context(
            start_fleet([place], lambda _: UrgentHost(config, place, addresses, options, classes))
        )
        worker.call_same("ready", timeout_seconds=START_SECONDS)
        yield worker
        worker.call_same("close", timeout_seconds=limit)
        servers.call_same("close", timeout_seconds=limit)
