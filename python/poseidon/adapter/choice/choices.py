"""Choices: measures the steps of one model, and changes schemes when that makes steps faster, on all ranks at once.

Rank 0 decides. It sends what it has decided while backward runs, every few steps, and all ranks change the schemes when
the next step begins. No rank waits for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from poseidon import _core
from poseidon.adapter import cost
from poseidon.adapter.agreement import check_same
from poseidon.adapter.choice.decision import Decider, Decision
from poseidon.adapter.choice.measurement import Processor, make_model, measured_rates
from poseidon.adapter.choice.prediction import Rates, StepModel
from poseidon.adapter.control import Control
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.state_text import broadcast
from poseidon.adapter.stats import BackwardPass, StepRecord
from poseidon.errors import InvalidArgument
from poseidon.options import Settings
from poseidon.rates import rate_text
from poseidon.schemes import SCHEMES


@dataclass(frozen=True)
class LoggedChoice:
    """One choice. It holds while the layer's mean K is at least half of `factor_count` and at most twice as much."""

    step: int  # the first with it; steps are counted as `Recovery.step`, or from 0 if there is no Recovery
    layer: str
    scheme: str
    factor_count: int
    reason: str = ""


class ChoiceLog:
    """The choices of one model, in the order of their steps. All ranks have the same log."""

    def __init__(self, choices: Iterable[LoggedChoice] = ()) -> None:
        self._choices = sorted(choices, key=lambda choice: choice.step)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def last_step(self) -> int:
        """The step of the last choice, or -1."""
        return self._choices[-1].step if self._choices else -1

    def add(self, choice: LoggedChoice) -> None:
        """Adds a choice, which is not earlier than the last one."""
        self._choices.append(choice)

    def at(self, step: int) -> list[LoggedChoice]:
        """The choices that are made at this step."""
        return [choice for choice in self._choices if choice.step == step]

    def in_force(self, step: int) -> dict[str, LoggedChoice]:
        """The last choice for each layer up to this step."""
        return {choice.layer: choice for choice in self._choices if choice.step <= step}

    def plain(self) -> list[dict[str, Any]]:
        """The log as plain data, for JSON and checkpoints."""
        return [asdict(choice) for choice in self._choices]

    @staticmethod
    def of(plain: Any, schemes: Mapping[str, Iterable[str]] | None = None) -> ChoiceLog:
        """The log that `plain` returned. `schemes`: those that each layer may take, if they are known.

        Raises InvalidArgument for something else, or for the log of another model.
        """
        try:
            choices = [LoggedChoice(**one) for one in plain]
            whole = all(type(number) is int for one in choices for number in (one.step, one.factor_count))
        except TypeError:
            whole = False
        if not whole:
            raise InvalidArgument("this is no log of choices: give what choices() of the other run's model returned")
        for one in choices:
            if schemes is not None and one.scheme not in schemes.get(one.layer, ()):
                raise InvalidArgument(
                    f"the log of choices says that layer {one.layer!r} takes scheme {one.scheme!r}, which it may not "
                    "take here: replay a log with the same model, number of workers and options"
                )
        return ChoiceLog(choices)


_PERIOD = 8  # steps from one decision to the next
_KEPT_RECORDS = 3  # of the last steps before a decision: to record a step takes time
_LEAST_STEPS = 5  # of which the median is taken
_LATENCY_ROUNDS = 5
_NOTHING, _CHANGED, _TAKEN_BACK = 0, 1, 2
_HEAD = 4  # numbers before those of the layers
_CODES = tuple(SCHEMES)


class Choices:
    """The choices of one model. `layers` are in the order in which backward finishes them.

    Call `begin_run` before every exchange of the model, and `end_run` when its results are in. Use it from the thread
    that trains.
    """

    _client: _core.Client
    _control: Control
    _processor: Processor

    def __init__(self, settings: Settings, layers: Sequence[SyncedLayer]) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._revises = settings.revise == "auto"
        self._settings = settings
        self._log = ChoiceLog()
        # Those that have a choice, and the schemes that they may take.
        self.open_layers: dict[str, tuple[str, ...]] = {}
        self._connected = False
        self._step = 0  # the next
        self._runs = 0  # since `connect`
        self._pending: Callable[[], list[int]] | None = None
        self._records: list[StepRecord] = []
        self._durations_s: list[float] = []
        self._began_ns: int | None = None
        self._warm = False  # a step since `_forget_steps` has begun

    def connect(self, client: _core.Client, control: Control, multiplies: bool) -> None:
        """Connects to `client`, to which the layers have been added. Collective.

        `multiplies`: whether the library makes the products of factors, and not the framework.
        """
        self._client, self._control, self._connected = client, control, True
        self._cluster = client.cluster
        self._pending, self._runs, self._decider = None, 0, Decider()
        self._forget_steps()
        self.renew()
        if self._measures:
            self._processor = self._measure(multiplies)

    def renew(self) -> None:
        """Makes the choices again, because layers have new numbers in the client."""
        if not self._connected:
            return
        self.open_layers = {
            name: tuple(layer.terms.schemes)
            for name, layer in self._layers.items()
            if layer.scheme == "auto" and layer.factorable
        }
        self.open_layers = {name: schemes for name, schemes in self.open_layers.items() if len(schemes) > 1}
        for choice in self._log.in_force(self._step).values():
            self._apply(choice)

    @property
    def _measures(self) -> bool:
        """Whether schemes may change; the same on all ranks."""
        return self._revises and bool(self.open_layers)

    @property
    def _message_size(self) -> int:
        return _HEAD + 2 * len(self.open_layers)

    def _measure(self, multiplies: bool) -> Processor:
        """Collective. The slowest rank's products count, because all wait for it."""
        rate = int(_core.multiply_adds_per_second() * self._settings.compute_threads)
        slowest = min(row[0] for row in self._control.one_hot([rate]))
        least_s = float("inf")
        for _ in range(_LATENCY_ROUNDS):
            begun = time.monotonic()
            self._control.sum([0] * self._message_size)  # also makes the layer of later messages
            least_s = min(least_s, time.monotonic() - begun)
        return Processor(float(slowest) if multiplies else float("inf"), least_s / 2)  # to a server and back

    # Steps.

    def begin_run(self, attempt: int) -> None:
        """Begins the exchange of a step. `attempt`: that of `Recovery`, or -1 if there is none."""
        now_ns = time.monotonic_ns()
        step = self._step if attempt < 0 else attempt
        is_first = attempt < 0 or attempt >= self._step  # and not a further exchange of the same attempt
        self._step = step + 1
        if self._pending is not None:
            answer, self._pending = self._pending(), None
            self._take(answer, step if is_first else step + 1)
        if is_first and (choices := self._log.at(step)):
            for choice in choices:
                self._apply(choice)
            self._forget_steps()
        if self._measures:
            self._note_begin(now_ns)
            if self._runs and self._runs % _PERIOD == 0:
                self._pending = self._control.start_sum(self._proposal(step))
            self._runs += 1

    def end_run(self, run: BackwardPass) -> None:
        """Takes the latest exchange, which `begin_run` has begun. Its results are in."""
        if self._measures and (self._runs - 1) % _PERIOD >= _PERIOD - _KEPT_RECORDS:
            self._records = [*self._records[1 - _KEPT_RECORDS :], StepRecord.of(run, self._client)]

    def _note_begin(self, now_ns: int) -> None:
        if self._began_ns is not None:
            self._durations_s.append((now_ns - self._began_ns) / 1e9)
            del self._durations_s[: -_PERIOD + 1]
        self._began_ns = now_ns if self._warm else None
        self._warm = True

    def _forget_steps(self) -> None:
        """Forgets what steps have shown, because the next ones are different. The next one does not count."""
        self._records, self._durations_s = [], []
        self._began_ns, self._warm = None, False

    def _apply(self, choice: LoggedChoice) -> None:
        if choice.layer in self.open_layers:  # servers may have taken it over since
            self._client.choose(self._layers[choice.layer].layer, choice.scheme, choice.factor_count)

    # Decisions.

    def model(self) -> StepModel | None:
        """The model of the latest measured step. None if no step has been measured."""
        if not self._records or not self._durations_s:
            return None
        layers = list(self._layers.values())
        step_s = sorted(self._durations_s)[len(self._durations_s) // 2]
        return make_model(layers, self.open_layers, self._records, step_s, self._cluster, self._processor)

    def rates(self, records: Sequence[StepRecord]) -> Rates | None:
        """What these steps show of ports and of the library's products. None if they have sent nothing."""
        processor = self._processor if self._measures else Processor(float("inf"), 0.0)
        return measured_rates(list(self._layers.values()), records, self._cluster, processor)

    def _proposal(self, step: int) -> list[int]:
        """What rank 0 tells the others, and zeros on the others."""
        nothing = [_NOTHING] * self._message_size
        if self._client.rank or len(self._durations_s) < _LEAST_STEPS or self._log.last_step > step:
            return nothing
        model = self.model()
        decision = None if model is None else self._decider.consider(model, self._durations_s)
        return nothing if decision is None else self._encoded(decision)

    def _encoded(self, decision: Decision) -> list[int]:
        numbers = [
            _TAKEN_BACK if decision.taken_back else _CHANGED,
            round(decision.measured_s * 1e6),
            round(decision.predicted_s * 1e6),
            round(decision.link_bytes_per_s),
        ]
        for name in self.open_layers:
            scheme, count = decision.schemes.get(name), self._factor_count(name)
            numbers += [_NOTHING, 0] if scheme is None or count is None else [_CODES.index(scheme) + 1, count]
        return numbers

    def _factor_count(self, name: str) -> int | None:
        total = self._client.layer_stats(self._layers[name].layer).factor_count
        return cost.mean_factor_count(total, self._client.world_size)

    def _take(self, numbers: Sequence[int], step: int) -> None:
        """Writes what rank 0 has decided into the log. It holds from this step on."""
        kind, measured_us, predicted_us, link = numbers[:_HEAD]
        if kind == _NOTHING or self._log.last_step > step:
            return
        measured, predicted = f"{measured_us / 1e3:.1f} ms", f"{predicted_us / 1e3:.1f} ms"
        if kind == _TAKEN_BACK:
            reason = f"taken again at step {step}: with the other scheme a step took {measured}, and {predicted} before"
        else:
            reason = f"chosen at step {step}: {predicted} predicted instead of {measured} a step"
        reason += f", with {rate_text(8 * link)} on a port"
        for name, code, count in zip(self.open_layers, numbers[_HEAD::2], numbers[_HEAD + 1 :: 2], strict=True):
            if code:
                self._log.add(LoggedChoice(step, name, _CODES[code - 1], count, reason))

    # The log.

    def log(self) -> list[dict[str, Any]]:
        """All choices so far, as plain data."""
        return self._log.plain()

    def seconds(self) -> dict[str, tuple[float, float]]:
        """The predicted and the measured time of each layer's last measured exchange, with the model of these steps."""
        model = self.model()
        if model is None:
            return {}
        predicted = model.predict(model.schemes).completed_s
        measured = {layer.name: layer.seconds for layer in self._records[-1].layers}
        return {
            name: (completed_s - unit.ready_s, measured[name])
            for unit, completed_s in zip(model.units, predicted, strict=True)
            for name in unit.names
        }

    def take_log(self, log: Any) -> None:
        """Takes over another rank's log, or that of a checkpoint. Call `resume` afterwards.

        What this rank has noted since then stays: the steps since then are made again, with the same choices.
        """
        taken = ChoiceLog.of(log)
        self._log = taken if len(taken) > len(self._log) else self._log

    def reasons(self) -> dict[str, str]:
        """Why each layer takes the scheme that was chosen for it. Layers whose choice does not hold are left out."""
        in_force = self._log.in_force(self._step).values()
        return {
            choice.layer: choice.reason
            for choice in in_force
            if choice.reason and self._client.next_scheme(self._layers[choice.layer].layer) == choice.scheme
        }

    def replay(self, log: Any, step: int) -> None:
        """Takes a log of this model. The next exchange is that of this step. Collective.

        Raises InvalidArgument for what is no log of this model, and Mismatch if the ranks give different ones.
        """
        if not self._connected:
            raise InvalidArgument("the model has no other workers yet: give it the log of choices after Recovery")
        check_same(self._control, json.dumps([step, log], default=str), "log of choices")
        taken = ChoiceLog.of(log, self.open_layers)
        for name in self._log.in_force(self._step).keys() & self.open_layers.keys():
            self._client.choose(self._layers[name].layer, "auto", 0)
        self._log, self._step, self._decider = taken, step, Decider()
        self._forget_steps()
        self.renew()

    def agree(self) -> None:
        """All ranks take the longest log: a rank may have noted a choice that another one has not. Collective."""
        lengths = [row[0] for row in self._control.one_hot([len(self._log)])]
        longest = max(lengths)
        if min(lengths) < longest:
            root = lengths.index(longest)
            log = broadcast(self.log() if self._client.rank == root else None, self._control, root)
            self._log = ChoiceLog.of(log)

    def resume(self, step: int) -> None:
        """Makes the next exchange, that of this step, take the schemes that it takes in the log."""
        self._step = step
        self.renew()
