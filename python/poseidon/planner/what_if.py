"""What a recorded run would have been on other ports, on other hosts, with another exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.critical_path import Part, critical_path, path_words, shares
from poseidon.planner.ddp import ddp_step_s, ddp_words
from poseidon.planner.layers import Exchange
from poseidon.planner.predict import Planner, Prediction
from poseidon.planner.recorded import RecordedRun
from poseidon.rates import parse_rate, rate_text
from poseidon.report.svg import number_text, seconds_text

_MOST_NAMED_HOSTS = 16  # more are simulated by classes, in which all are alike
_MOST_FITTED, _PRECISION = 100.0, 1.005  # of the rate of ports beside a slow worker


@dataclass(frozen=True)
class Change:
    """What is different from the run. `link` is a rate, such as 10gbit, or a factor, such as 2x.

    None: as in the run. `straggler` False: no worker computes longer than the others. `slow_port` False: all ports are
    as fast as those of the other hosts.
    """

    link: str | None = None
    hosts: int | None = None
    scheme: str | None = None
    wire: str | None = None
    overlap: bool | None = None
    straggler: bool = True
    slow_port: bool = True

    def cluster(self, recorded: RecordedRun) -> ClusterSpec:
        """The changed cluster. Raises InvalidArgument for what cannot be."""
        run = recorded.cluster
        hosts = run.hosts if self.hosts is None else self.hosts
        now = run.bits_per_second * (1.0 if self.slow_port else recorded.port_ratio)
        rate = now if self.link is None else _rate(self.link, now)
        alone = hosts * run.workers_per_host == 1
        slowest = run.slowest if self.straggler and not alone else 1.0
        servers = -(-run.servers * hosts // run.hosts) if hosts > 1 else 0
        return replace(run, hosts=hosts, bits_per_second=rate, slowest=slowest, servers=servers)

    def exchange(self, run: Exchange) -> Exchange:
        """The changed exchange."""
        given: dict[str, Any] = {"scheme": self.scheme, "wire": self.wire, "overlap": self.overlap}
        return replace(run, **{name: value for name, value in given.items() if value is not None})

    def words(self, run: RecordedRun) -> str:
        """The change in words."""
        parts = []
        if self.link is not None:
            parts.append(f"ports of {rate_text(self.cluster(run).bits_per_second)}")
        if self.hosts is not None:
            parts.append(f"{self.hosts} host{'s' * (self.hosts != 1)}")
        parts += [f"scheme={self.scheme}"] if self.scheme is not None else []
        parts += [f"wire={self.wire}"] if self.wire is not None else []
        if self.overlap is not None:
            parts.append("a DistributedOptimizer" if self.overlap else "no DistributedOptimizer")
        parts += [] if self.straggler else [f"{run.slow_host or 'all'} as fast as the others"]
        parts += [] if self.slow_port else [f"the port of {run.slow_port or 'all'} as fast as the others'"]
        return ", ".join(parts) or "as it was"


def _rate(text: str, now: float) -> float:
    if text.endswith("x"):
        try:
            factor = float(text[:-1])
        except ValueError:
            factor = 0.0
        if not 0 < factor < float("inf"):
            raise InvalidArgument(f"--link {text}: give a factor above 0, such as 2x, or a rate, such as 10gbit")
        return now * factor
    return float(parse_rate(text))


@dataclass(frozen=True)
class Outcome:
    """A change and the step that is predicted for it."""

    words: str
    step: Prediction
    path: list[Part]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "change": self.words,
            "step_s": self.step.step_s,
            "workers": self.step.cluster.workers,
            "bits_per_second": self.step.cluster.bits_per_second,
            "critical_path_s": shares(self.path),
        }


@dataclass(frozen=True)
class WhatIf:
    """A run, what the simulation makes of it as it was, and of changes to it."""

    run: RecordedRun
    now: Outcome
    changes: tuple[Outcome, ...]

    @property
    def error(self) -> float:
        """The simulated step of the run as it was over the measured one, less 1."""
        return self.now.step.step_s / self.run.step_s - 1

    def speed(self, outcome: Outcome) -> float:
        """How many times as many samples a second as the run, if each worker keeps its batch."""
        now, then = self.now.step, outcome.step
        return then.cluster.workers / then.step_s / (now.cluster.workers / now.step_s)

    @property
    def ddp_step_s(self) -> float:
        """The step of the run with torch's DistributedDataParallel, predicted."""
        return _ddp_step_s(self.run)

    @property
    def best(self) -> Outcome:
        """The change that gives most samples a second."""
        return max(self.changes, key=self.speed)

    def sentences(self) -> list[str]:
        """What the run was, and where its time went."""
        run, step = self.run, self.now.step
        words = (
            f"{run.title} on {run.cluster.workers} workers, with ports that carried "
            f"{rate_text(run.cluster.bits_per_second)}: a step took {seconds_text(run.step_s)}; "
            f"simulated, {seconds_text(step.step_s)} ({self.error:+.1%})."
        )
        found = [words, f"Critical path: {path_words(self.now.path)}."]
        if run.slow_host is not None:
            found.append(
                f"{run.slow_host} computes {number_text(run.cluster.slowest)} times as long as the others. So "
                "exchanges do not show how fast ports are, and their rate is the one with which the simulated step is "
                "the measured one."
            )
        if run.slow_port is not None:
            times = number_text(run.port_ratio)
            found.append(f"The port of {run.slow_port} carries {times} times less than those of the others.")
        return [*found, ddp_words(self.ddp_step_s, step.step_s)]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "run": self.run.title,
            "measured_step_s": self.run.step_s,
            "error": self.error,
            "slow_host": self.run.slow_host,
            "slow_port": self.run.slow_port,
            "port_ratio": self.run.port_ratio,
            "now": self.now.to_json(),
            "ddp_step_s": self.ddp_step_s,
            "changes": [{**one.to_json(), "speed": self.speed(one)} for one in self.changes],
        }


def what_if(run: RecordedRun, changes: Sequence[Change]) -> WhatIf:
    """Simulates the run as it was, and each change. Without changes those that are usual."""
    run = _fitted(run)
    now = _outcome(run, Change())
    return WhatIf(run, now, tuple(_outcome(run, change) for change in changes or list(_usual(run))))


def ddp_step_of(run: RecordedRun) -> float:
    """The step of a run with torch's DistributedDataParallel, predicted."""
    return _ddp_step_s(_fitted(run))


def _ddp_step_s(fitted: RecordedRun) -> float:
    return ddp_step_s(fitted.table, fitted.cluster, fitted.number_bytes)


def _usual(run: RecordedRun) -> Iterator[Change]:
    """What somebody may ask of any run."""
    hosts, exchange = run.cluster.hosts, run.exchange
    yield Change(link="2x")
    yield Change(link="10x")
    if hosts > 1:
        yield Change(hosts=hosts // 2)
        yield Change(hosts=hosts * 2)
    others = ("ps", "sfb") if run.knows_factors else ()
    yield from (Change(scheme=scheme) for scheme in others if scheme != exchange.scheme)
    if exchange.wire == "fp32":
        yield Change(wire="bf16")
    if run.can_overlap:
        yield Change(overlap=not exchange.overlap)
    if run.slow_host is not None:
        yield Change(straggler=False)
    if run.slow_port is not None:
        yield Change(slow_port=False)


def _fitted(run: RecordedRun) -> RecordedRun:
    """A run with a slow worker with the rate of ports with which its simulated step is the measured one.

    Exchanges last until the slow worker takes part, so they do not show how fast ports are.
    """
    if run.slow_host is None:
        return run
    low, high = run.cluster.bits_per_second, run.cluster.bits_per_second * _MOST_FITTED
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        tried = replace(run, cluster=replace(run.cluster, bits_per_second=middle))
        low, high = (middle, high) if _outcome(tried, Change()).step.step_s > run.step_s else (low, middle)
    return replace(run, cluster=replace(run.cluster, bits_per_second=high))


def _outcome(run: RecordedRun, change: Change) -> Outcome:
    if change.scheme not in (None, "ps") and not run.knows_factors:
        raise InvalidArgument(
            f"this run had scheme={run.exchange.scheme} and has told nothing of factors: record it with scheme=auto to "
            f"predict {change.scheme}"
        )
    cluster = change.cluster(run)
    planner = Planner(run.table, cluster, change.exchange(run.exchange))
    step = planner.predict_as(run.schemes) if _keeps_schemes(run, change) else planner.predict()
    uneven = run.slow_port is not None and change.slow_port and change.link is None and cluster.hosts > 1
    if (cluster.slowest > 1 or uneven) and planner.has_messages and cluster.workers <= _MOST_NAMED_HOSTS:
        names = _names(run, cluster)
        times = [run.port_ratio if uneven and name != run.slow_port else 1.0 for name in names]
        step = planner.predict_by_message(chosen=step, hosts=names, slow=run.slow_table, port_times=times)
    return Outcome(change.words(run), step, critical_path(step))


def _keeps_schemes(run: RecordedRun, change: Change) -> bool:
    """Whether layers have the schemes of the run. On other ports training would choose them again, by time."""
    chooses = run.exchange.scheme == "auto" and run.exchange.by_time
    return change.scheme is None and change.wire is None and change.hosts is None and not (change.link and chooses)


def _names(run: RecordedRun, cluster: ClusterSpec) -> list[str]:
    """The slow host by its name, and then that with the slow port. Of the others none differs."""
    named = [run.slow_host or run.slow_port or ""]
    if run.slow_port is not None and run.slow_port not in named:
        named.append(run.slow_port)
    return [*named[: cluster.hosts], *["another host"] * (cluster.hosts - len(named))]
