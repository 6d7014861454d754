"""Choices by time in training: all ranks change together, and a log of choices gives the same bits again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.adapter.choice import choices as choices_module
from poseidon.adapter.choice.choices import Choices
from poseidon.adapter.choice.decision import Decision
from poseidon.errors import InvalidArgument, Mismatch
from recovery_cases import Fault, Faults, Supervisor, batch, make_optimizer, network
from torch_cases import digest, mlp, mlp_batch, own_rows, parameters_digest

FIRST, SECOND = "0.weight", "2.weight"
STEPS = 12
SIZE = 3


@contextmanager
def decided(script: Mapping[int, dict[str, str]]) -> Iterator[None]:
    """Rank 0 decides what the script says, by the step in which it sends it, in every second step."""

    def proposal(self: Choices, step: int) -> list[int]:
        if self._client.rank == 0 and step in script and self._log.last_step <= step:
            return self._encoded(Decision(script[step], False, 0.02, 0.01, 1e6))
        return [0] * self._message_size

    with mock.patch.object(choices_module, "_PERIOD", 2), mock.patch.object(Choices, "_proposal", proposal):
        yield


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[dict[str, str]]:
    """The schemes of every step."""
    schemes = []
    for step in steps:
        inputs, targets = map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        schemes.append({layer.name: layer.scheme for layer in model.synchronization_stats()})
    return schemes


def make(overlap: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = poseidon.DistributedDataParallel(mlp())
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, poseidon.DistributedOptimizer(inner, model) if overlap else inner


def choose_and_replay(overlap: bool) -> tuple[Any, ...]:
    model, optimizer = make(overlap)
    with decided({2: {FIRST: "ps"}, 6: {FIRST: "sfb", SECOND: "ps"}}):
        schemes = train_steps(model, optimizer, range(STEPS))
    log = model.choices()
    again, other = make(overlap)
    again.replay_choices(json.loads(json.dumps(log)))
    replayed = train_steps(again, other, range(STEPS))
    plain, third = make(overlap)
    train_steps(plain, third, range(STEPS))
    reasons = {row.layer: row.reason for row in model.plan()}
    return schemes, log, replayed, parameters_digest(model), parameters_digest(again), parameters_digest(plain), reasons


@pytest.mark.parametrize("overlap", [False, True])
def test_all_ranks_change_in_one_step_and_a_log_gives_the_same_bits(overlap: bool) -> None:
    answers = workers.run(SIZE, choose_and_replay, overlap, priority_threshold="0.5")
    assert all(answer == answers[0] for answer in answers), "ranks differ"
    schemes, log, replayed, chosen, again, plain, reasons = answers[0]
    assert [step[FIRST] for step in schemes] == ["sfb"] * 3 + ["ps"] * 4 + ["sfb"] * 5
    assert [step[SECOND] for step in schemes] == ["sfb"] * 7 + ["ps"] * 5
    assert [(entry["step"], entry["layer"], entry["scheme"]) for entry in log] == [
        (3, FIRST, "ps"),
        (7, SECOND, "ps"),
        (7, FIRST, "sfb"),
    ]
    assert replayed == schemes
    assert chosen == again
    assert chosen != plain, "the schemes round alike, so that this test cannot fail"
    assert reasons[SECOND].startswith("chosen at step 7: 10.0 ms predicted instead of 20.0 ms a step")


def another_batch() -> tuple[list[str], list[str]]:
    model, optimizer = make(overlap=False)
    entry = {"step": 0, "layer": FIRST, "scheme": "ps", "factor_count": 4}
    model.replay_choices([entry])
    schemes, reasons = [], []
    for rows in (4, 4, 1, 1, 8, 9, 9, 4, 4):
        inputs, targets = torch.randn(rows, 48), torch.randn(rows, 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        schemes.append(next(row.scheme for row in model.synchronization_stats() if row.name == FIRST))
        reasons.append(next(row.reason for row in model.plan() if row.layer == FIRST))
    return schemes, reasons


def test_a_choice_does_not_hold_for_another_batch() -> None:
    for schemes, reasons in workers.run(2, another_batch):
        # The scheme of a step follows the rows of the step before.
        assert schemes == ["ps", "ps", "ps", "sfb", "sfb", "ps", "sfb", "sfb", "ps"]
        assert all("bytes per node" in reason for reason in reasons), "this choice has no reason of its own"


def misuse() -> list[str]:
    model, optimizer = make(overlap=False)
    good = {"step": 0, "layer": FIRST, "scheme": "ps", "factor_count": 4}
    texts = []
    for log, kind in (
        ([{**good, "layer": "9.weight"}], InvalidArgument),
        ([{**good, "scheme": "project_adam"}], InvalidArgument),
        ([{**good, "step": "soon"}], InvalidArgument),
        (["text"], InvalidArgument),
        ([{**good, "factor_count": poseidon.rank()}], Mismatch),
    ):
        with pytest.raises(kind) as failure:
            model.replay_choices(log)
        texts.append(str(failure.value))
    assert model.choices() == []
    train_steps(model, optimizer, range(2))
    return texts


def test_a_log_that_does_not_fit_is_refused() -> None:
    (texts, _) = workers.run(2, misuse)
    assert "9.weight" in texts[0]
    assert "project_adam" in texts[1]
    assert "log of choices" in texts[4]


def measured() -> list[tuple[Any, ...]]:
    model, optimizer = make(overlap=False)
    assert all(row.measured_seconds is None for row in model.plan())
    train_steps(model, optimizer, range(10))
    return [(row.predicted_seconds, row.measured_seconds) for row in model.plan()]


def test_the_plan_has_predicted_and_measured_times() -> None:
    for rows in workers.run(2, measured):
        assert all(predicted > 0 and taken > 0 for predicted, taken in rows)


def unmeasured() -> list[Any]:
    model, optimizer = make(overlap=False)
    train_steps(model, optimizer, range(20))
    return [*model.choices(), *(row.measured_seconds for row in model.plan() if row.measured_seconds is not None)]


def test_nothing_is_measured_without_revisions() -> None:
    assert workers.run(2, unmeasured, revise="off") == [[], []]


def ranks_disagree() -> str:
    poseidon.init(revise="off" if poseidon_rank() else "auto")
    return ""


def poseidon_rank() -> int:
    import os

    return int(os.environ["RANK"])


def test_ranks_agree_on_revisions() -> None:
    answers = workers.run_fresh(2, ranks_disagree)
    assert all(isinstance(answer, workers.Failure) and "revise" in answer.text for answer in answers)


# With workers that are lost.


def train(folder: Path, kind: str, faults: list[Fault], log: str) -> dict[str, Any]:
    """Rank 0 wants another scheme in every second step; or, with a log, the choices are those of another run."""
    dies = Faults(folder, faults)
    poseidon.init()
    module = network(kind)
    model = poseidon.DistributedDataParallel(module)
    optimizer = make_optimizer(kind, model)
    recovery = poseidon.Recovery(model, optimizer, seed=7)
    if log:
        model.replay_choices(json.loads(log), recovery.step)
    turns = {step: {"0.weight": ("ps", "sfb")[step // 2 % 2]} for step in range(STEPS)}
    with decided({} if log else turns):
        while recovery.until(STEPS):
            with recovery.attempt():
                inputs, targets = batch(recovery.step, poseidon.rank(), poseidon.world_size())
                loss = nn.functional.mse_loss(model(inputs), targets)
                dies.reached("backward", recovery.step)
                loss.backward()
                dies.reached("before step", recovery.step)
                optimizer.step()
                dies.reached("end", recovery.step)
    answer = {"digest": digest([*module.parameters()]), "log": model.choices()}
    poseidon.shutdown()
    return answer


@pytest.mark.parametrize("kind", ["sgd", "adamw overlap"])
def test_a_recovered_training_has_the_bits_of_an_undisturbed_one_with_its_log(tmp_path: Path, kind: str) -> None:
    faults = [
        Fault(1, 3, "backward"),
        Fault(0, 5, "before step"),
        Fault(2, 6, "end"),
        Fault(0, 8, "backward", 0.003),
    ]
    (tmp_path / "faults").mkdir()
    disturbed = Supervisor(tmp_path / "faults", SIZE).run(train, kind, faults, "")
    log = disturbed[0]["log"]
    assert {entry["scheme"] for entry in log} == {"ps", "sfb"}
    assert all(answer == disturbed[0] for answer in disturbed)
    (tmp_path / "none").mkdir()
    calm = Supervisor(tmp_path / "none", SIZE, POSEIDON_REVISE="off").run(train, kind, [], json.dumps(log))
    assert calm == disturbed
