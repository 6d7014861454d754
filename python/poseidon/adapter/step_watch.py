"""Watches the steps of a framework that runs them without Python, as compiled programs do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from poseidon import _core
from poseidon.adapter.choice.measurement import Processor, measured_rates
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.membership import Membership
from poseidon.adapter.plan_table import PlanRow, make_plan_table
from poseidon.adapter.run_record import FIRST_STEPS, STEPS, RunRecorder, recorder_of
from poseidon.adapter.stats import StepRecord, synchronization_of

_LOOKS_EVERY_S = 0.5


def watch_steps(here: Membership, layers: Sequence[SyncedLayer], framework: str) -> None:
    """Watches the steps of a model of the job `here` until it is left. The layers have been added to its client.

    Its figures go to `poseidon top` and `poseidon metrics`. With the option `record` some of its first steps are
    written. Notices of the client become warnings. Of several models of a job the first one is watched.
    """
    if here.watch is None and here.client is not None and layers:
        here.watch = StepWatch(here, here.client, layers, framework)


class StepWatch:
    """A thread that looks twice a second at what the client has kept of the steps for which it was asked."""

    def __init__(self, here: Membership, client: _core.Client, layers: Sequence[SyncedLayer], framework: str) -> None:
        self._here, self._client, self._layers = here, client, list(layers)
        self._step, self._end_ns, self._waited_ns = 0, 0, 0  # of what was seen last; the wait of all steps so far
        self._recorder = recorder_of(here, framework)
        if self._recorder is None:
            self._ask(2, 1)
        else:
            self._processor = _processor_of(layers, here.settings.compute_threads)
            self._ask(FIRST_STEPS[0], STEPS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poseidon-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. What has been recorded by now is written."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY_S):
            self._look()
        self._look()

    def _ask(self, first: int, count: int) -> None:
        self._first, self._count = first, count
        self._client.record_pushes(first, count)

    def _look(self) -> None:
        self._here.tell_notices()
        steps = self._kept()
        if steps:
            self._show(steps[-1])
            if self._recorder is not None:
                self._write(self._recorder, steps)
                self._recorder = None
        numbers = [self._client.layer_stats(layer.layer).step for layer in self._layers]
        if steps or min(numbers) >= self._first + self._count:
            # Ranks ask for the same steps, unless one of them is just faster than the bound of a power of two.
            stride = self._stride(max(numbers))
            self._ask((max(numbers) + 1) // stride * stride + stride, 1)

    def _kept(self) -> list[StepRecord]:
        """The steps for which it has asked, if they are over."""
        pushes = [self._client.recorded_pushes(layer.layer) for layer in self._layers]
        if min(map(len, pushes), default=0) < self._count:
            return []
        steps: list[StepRecord] = []
        for seen in zip(*pushes, strict=True):
            steps.append(_step_of(self._layers, seen, _end_ns(steps[-1]) if steps else 0))
        return steps

    def _stride(self, step: int) -> int:
        """A power of two. So many steps take about as long as it is from one look to the next, or longer."""
        now_ns, stride = time.monotonic_ns(), 1
        per_look = (step - self._step) * _LOOKS_EVERY_S * 1e9 / max(1, now_ns - self._end_ns)
        while stride < per_look:
            stride *= 2
        return stride

    def _show(self, latest: StepRecord) -> None:
        step = self._first + self._count - 1
        self._waited_ns += (step - self._step) * latest.waited_ns
        self._step, self._end_ns = step, _end_ns(latest)
        if self._here.meter is not None:
            self._here.meter.show(step, self._waited_ns, latest.layers, self._end_ns)

    def _write(self, recorder: RunRecorder, steps: Sequence[StepRecord]) -> None:
        rates = measured_rates(self._layers, steps, self._client.cluster, self._processor)
        recorder.write(recorder.made(self._client, self._plan(steps), rates, self._first, steps))

    def _plan(self, steps: Sequence[StepRecord]) -> list[PlanRow]:
        """The plan in the order of forward, which is that of backward turned round."""
        since_begin_ns: Counter[str] = Counter()  # in all steps
        for step in steps:
            since_begin_ns.update({layer.name: layer.started_ns - step.backward_begin_ns for layer in step.layers})
        rows = make_plan_table(self._layers, self._here)
        return sorted(rows, key=lambda row: since_begin_ns[row.layer], reverse=True)


def _end_ns(step: StepRecord) -> int:
    return max(layer.completed_ns for layer in step.layers)


def _step_of(layers: Sequence[SyncedLayer], seen: Sequence[_core.LayerStats], forward_begin_ns: int) -> StepRecord:
    """A step of which only the exchanges were seen. Backward lasts from the first gradient to the last one, and then
    the program waits for the last result."""
    found = synchronization_of(layers, seen)
    begin_ns, end_ns = found[0].backward_begin_ns, found[0].backward_end_ns
    waited_ns = max(0, max(layer.completed_ns for layer in found) - end_ns)
    return StepRecord(begin_ns, end_ns, found, forward_begin_ns, waited_ns)


def _processor_of(layers: Sequence[SyncedLayer], threads: int) -> Processor:
    multiplies = any(layer.factorable for layer in layers)
    return Processor(_core.multiply_adds_per_second() * threads if multiplies else float("inf"), 0.0)
