"""Some steps of a run as one worker has seen them: what the option `record` writes (docs/what-if.md).

Every worker writes rank-R.json into the folder. `poseidon report` and `poseidon what-if` read them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from poseidon import _core
from poseidon.adapter.choice.prediction import Rates
from poseidon.adapter.membership import Membership
from poseidon.adapter.plan_table import PlanRow
from poseidon.adapter.stats import BackwardPass, LayerSynchronization, StepRecord
from poseidon.errors import InvalidArgument
from poseidon.live import LinkMeter, own_addresses
from poseidon.options import Settings

VERSION = 2
STEPS = 10
FIRST_STEPS = (5, 55)  # of the recorded ones: the later, with settled choices, replace the earlier
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OPTIONS = (
    *("scheme", "wire", "lossy", "parameter_wire", "chunk_bytes", "small_bytes", "group_bytes"),
    *("partition", "schedule", "revise"),
    *("priority_classes", "priority_order", "priority_threshold", "stragglers", "consistency"),
)


@dataclass(frozen=True)
class RunRecord:
    """What one worker has recorded. Times of steps are those of its machine's clock, which `boot` names.

    `machines` has the machine of each rank, and `racks` the rack of each if the job knows them. `link_bytes_per_s` is
    what the busiest port carried while it was busy, without headers. None: not known. `multiply_adds_per_s`: of the
    library's products; None: the framework makes them. `addresses` are this worker's. `sent` has, for each address of
    another one, the bytes that it has acknowledged, and for how many seconds some were on the way to it.
    `forward_begin_ns` has the begin of each step's forward pass.
    """

    framework: str
    title: str
    job: str
    rank: int
    world_size: int
    host: str
    boot: str
    machines: list[int]
    racks: list[int]
    servers: int
    placement: str
    options: dict[str, Any]
    overlap: bool
    first_step: int
    link_bytes_per_s: float | None
    latency_s: float
    multiply_adds_per_s: float | None
    addresses: list[str]
    sent: dict[str, tuple[int, float]]
    plan: list[PlanRow]
    steps: list[StepRecord]
    version: int = VERSION


def recorder_of(here: Membership, framework: str = "torch") -> RunRecorder | None:
    """What records the steps of the job's next model, which `framework` trains.

    None if it is not the first model, or the option `record` is not set.

    A process group of some ranks of the job has no records.
    """
    if not here.settings.record or here.is_recorded or not here.is_world:
        return None
    here.is_recorded = True
    return RunRecorder(here.settings, framework)


class RunRecorder:
    """Records steps of one model, and writes them as soon as there are enough."""

    def __init__(self, settings: Settings, framework: str) -> None:
        self._folder, self._settings, self._framework = Path(settings.record), settings, framework
        self._count = 0
        self._steps: list[StepRecord] = []
        self._links = LinkMeter()

    def step_finished(
        self,
        run: BackwardPass,
        here: Membership,
        plan: Callable[[], Sequence[PlanRow]],
        rates: Callable[[Sequence[StepRecord]], Rates | None],
    ) -> None:
        """The gradients of a step of the job `here` have all arrived.

        `plan` makes its plan, and `rates` says what recorded steps show of ports.
        """
        self._count += 1
        first = max((step for step in FIRST_STEPS if step <= self._count), default=self._count + 1)
        if not first <= self._count < first + STEPS:
            return
        if self._count == first:
            self._links.sent()  # from here on
        step = replace(
            StepRecord.of(run, here.present_client), forward_begin_ns=run.forward_begin_ns, waited_ns=run.waited_ns
        )
        self._steps = [*(self._steps if self._count > first else []), step]
        if len(self._steps) == STEPS:
            self.write(self.made(here.present_client, list(plan()), rates(self._steps), first, self._steps))

    def write(self, record: RunRecord) -> None:
        """Writes what `made` has made. It warns if the file cannot be written."""
        path = self._folder / f"rank-{record.rank}.json"
        scratch = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(asdict(record)), encoding="utf-8")
            scratch.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            warnings.warn(
                f"record={self._folder}: this worker's steps cannot be written: {error}; training goes on, but "
                f"`poseidon report` lacks rank {record.rank}: make room there, or name another folder with --record",
                stacklevel=2,
            )

    def made(
        self,
        client: _core.Client,
        plan: list[PlanRow],
        rates: Rates | None,
        first_step: int,
        steps: Sequence[StepRecord],
    ) -> RunRecord:
        """The record of these steps of `client`'s job. `plan` is in the order of forward."""
        cluster = client.cluster
        products = None if rates is None or math.isinf(rates.multiply_adds_per_s) else rates.multiply_adds_per_s
        options = {name: getattr(self._settings, name) for name in _OPTIONS}
        return RunRecord(
            framework=self._framework,
            title=Path(sys.argv[0]).name or "run",
            job=self._settings.job,
            rank=client.rank,
            world_size=client.world_size,
            host=socket.gethostname(),
            boot=_BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname(),
            machines=list(cluster.hosts),
            racks=list(cluster.racks),
            servers=cluster.server_count,
            placement=cluster.placement,
            options={
                name: value if isinstance(value, (int, float, str)) else str(value) for name, value in options.items()
            },
            overlap=any(row.urgency is not None for row in plan),
            first_step=first_step,
            link_bytes_per_s=None if rates is None else rates.link_bytes_per_s,
            latency_s=0.0 if rates is None else rates.latency_s,
            multiply_adds_per_s=products,
            addresses=own_addresses(),
            sent=self._links.sent(),
            plan=plan,
            steps=list(steps),
        )


def load_run(folder: str | os.PathLike[str]) -> list[RunRecord]:
    """The records of all workers, by rank. Raises InvalidArgument if there are none, or some are missing or foreign."""
    paths = sorted(Path(folder).glob("rank-*.json"))
    if not paths:
        raise InvalidArgument(
            f"{folder} has no records of a run: start one with `poseidon run --record {folder}` or with "
            f"POSEIDON_RECORD={folder}; a worker writes them after {FIRST_STEPS[0] + STEPS - 1} steps"
        )
    records = sorted((_read(path) for path in paths), key=lambda record: record.rank)
    first = records[0]
    if any((one.job, one.world_size) != (first.job, first.world_size) for one in records):
        raise InvalidArgument(f"{folder} has records of different runs: give each run a folder of its own")
    missing = sorted(set(range(first.world_size)) - {one.rank for one in records})
    if missing:
        raise InvalidArgument(
            f"{folder} lacks the records of {len(missing)} of {first.world_size} ranks, such as rank {missing[0]}: "
            "copy those of all machines into one folder"
        )
    common = {one.first_step for one in records}
    if len(common) > 1:
        raise InvalidArgument(f"{folder} has records of different steps ({sorted(common)}): the run ended in between")
    return records


def _read(path: Path) -> RunRecord:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["version"] != VERSION:
            raise InvalidArgument(f"{path} is of another version of poseidon-dl: read it with that one")
        values["plan"] = [PlanRow(**{**row, "shape": tuple(row["shape"])}) for row in values["plan"]]
        values["steps"] = [_step(step) for step in values["steps"]]
        return RunRecord(**{field.name: values[field.name] for field in fields(RunRecord)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"{path} is no record of a run, or a part of one: {_fault(error)}; copy it again from its worker's "
            "machine, or record the run again"
        ) from None


def _fault(error: Exception) -> str:
    """What is wrong with a record, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return f"it lacks {error}" if isinstance(error, KeyError) else "its values have another form"


def _step(values: dict[str, Any]) -> StepRecord:
    return StepRecord(**{**values, "layers": [LayerSynchronization(**layer) for layer in values["layers"]]})
