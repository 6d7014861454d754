"""LocalSGD in fragments that overlap with steps: the bits of an emulation, checkpoints, recovery, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from local_sgd_cases import OUTER, RANKS, Emulation, adamw, backward, mean, replicas_equal
from poseidon.errors import InvalidArgument, Mismatch, PoseidonError
from recovery_cases import Fault, Supervisor
from recovery_cases import train as train_in_attempts
from torch_cases import mlp, parameters_digest

EVERY, STEPS = 4, 11
PLANS: list[dict[str, Any]] = [
    {"fragments": 2},
    {"fragments": 4},
    {"fragments": 2, "overlap_steps": 1},
    {"fragments": 2, "overlap_steps": 2, "mix": 0.25},
    {"fragments": 1, "overlap_steps": 4, "mix": 0.0},
    {"fragments": 3, "overlap_steps": 1},
]


def cut(model: nn.Module, count: int) -> list[list[int]]:
    """The places of each fragment's parameters. The MLP's are 3072, 64, 2560, 40, 160 and 4 elements."""
    assert [param.numel() for param in model.parameters()] == [3072, 64, 2560, 40, 160, 4]
    return {
        1: [[0, 1, 2, 3, 4, 5]],
        2: [[0], [1, 2, 3, 4, 5]],
        3: [[0], [1, 2], [3, 4, 5]],
        4: [[0], [1, 2], [3, 4], [5]],
    }[count]


class StreamEmulation(Emulation):
    """All ranks in one process; `outer`: with torch's SGD on the mean pseudo-gradient."""

    def __init__(
        self, outer: bool, fragments: int, overlap_steps: int = 0, mix: float | None = None, ranks: int = RANKS
    ) -> None:
        super().__init__(adamw, mlp(), ranks)
        self._parts = cut(self.models[0], fragments)
        self._overlap = overlap_steps
        self._mix = (0.5 if overlap_steps else 0.0) if mix is None else mix
        self._arriving: list[tuple[int, list[int], list[torch.Tensor]]] = []
        self._held = [nn.Parameter(param.detach().clone()) for param in self.models[0].parameters()]
        make = OUTER.optimizer if outer else None
        self._outers = [make([self._held[i] for i in part]) for part in self._parts] if make else []

    def step(self, step: int) -> None:
        super().step(step)
        number = step + 1
        self._arrive(number)
        for index, part in enumerate(self._parts):
            if (number - 1) % EVERY + 1 == (index + 1) * EVERY // len(self._parts):
                self._arriving.append((number + self._overlap, part, self._sent(index, part)))
        self._arrive(number)

    def _sent(self, index: int, part: list[int]) -> list[torch.Tensor]:
        params = [[list(model.parameters())[i].detach() for model in self.models] for i in part]
        if not self._outers:
            return [mean(same).clone() for same in params]
        for i, same in zip(part, params, strict=True):
            self._held[i].grad = mean([self._held[i].detach() - one for one in same])
        self._outers[index].step()
        return [self._held[i].detach().clone() for i in part]

    @torch.no_grad()
    def _arrive(self, number: int, mix: float | None = None) -> None:
        for due, part, values in list(self._arriving):
            if due > number:
                continue
            self._arriving.pop(0)
            for i, value in zip(part, values, strict=True):
                for model in self.models:
                    param = list(model.parameters())[i]
                    if self._mix:
                        param.mul_(self._mix).add_(value, alpha=1 - self._mix)
                    else:
                        param.copy_(value)

    def equalize(self) -> None:
        """As average()."""
        self._arrive(10**6)
        everything = [(part, self._sent(index, part)) for index, part in enumerate(self._parts)]
        with torch.no_grad():
            for part, values in everything:
                for i, value in zip(part, values, strict=True):
                    for model in self.models:
                        list(model.parameters())[i].copy_(value)


def expected(outer: bool, plan: dict[str, Any], ranks: int = RANKS) -> list[list[str]]:
    emulation = StreamEmulation(outer, ranks=ranks, **plan)
    digests: list[list[str]] = [[] for _ in emulation.models]
    for step in range(STEPS + 1):
        if step < STEPS:
            emulation.step(step)
        else:
            emulation.equalize()
        for own, model in zip(digests, emulation.models, strict=True):
            own.append(parameters_digest(model))
    return digests


def train(outer: bool, plan: dict[str, Any]) -> tuple[list[str], bool, int]:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), EVERY, outer=OUTER if outer else None, **plan)
    digests = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
        digests.append(parameters_digest(model))
    optimizer.average()
    optimizer.average()  # nothing is left
    digests.append(parameters_digest(model))
    return digests, replicas_equal(model), optimizer.averaging_count


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_the_bits_are_those_of_an_emulation(plan: dict[str, Any], outer: bool) -> None:
    answers = workers.run(RANKS, train, outer, plan)
    wanted = expected(outer, plan)
    for rank in range(RANKS):
        assert answers[rank][0] == wanted[rank]
    assert all(equal and count == STEPS // EVERY + 1 for _, equal, count in answers)
    assert len({digests[EVERY - 1] for digests, *_ in answers}) == RANKS  # at the end of a period they differ


@pytest.mark.parametrize("outer", [False, True])
def test_one_worker_mixes_too(outer: bool) -> None:
    ((digests, equal, _),) = workers.run(1, train, outer, PLANS[3])
    assert equal
    assert digests == expected(outer, PLANS[3], ranks=1)[0]


# Checkpoints and recovery.


def continued(outer: bool, plan: dict[str, Any], at: int) -> tuple[str, str, str]:
    """Digests at the end: without a break, and of new objects with the state of step `at`; why others refuse it."""

    def made() -> tuple[nn.Module, poseidon.LocalSGD]:
        model = mlp()
        return model, poseidon.LocalSGD(model, adamw(model), EVERY, outer=OUTER if outer else None, **plan)

    def steps(model: nn.Module, optimizer: poseidon.LocalSGD, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            backward(model, poseidon.rank(), step)
            optimizer.step()

    model, optimizer = made()
    steps(model, optimizer, range(at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    poseidon.barrier()  # the others may still ask this rank's server for the state
    steps(model, optimizer, range(at, STEPS))
    optimizer.average()
    again, other = made()
    steps(again, other, range(20, 20 + EVERY))  # a fragment of these is under way
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    steps(again, other, range(at, STEPS))
    other.average()
    plain = mlp()
    with pytest.raises(Mismatch) as error:
        poseidon.LocalSGD(plain, adamw(plain), EVERY, outer=OUTER if outer else None).load_state_dict(saved[1])
    return parameters_digest(model), parameters_digest(again), str(error.value)


def loaded_while_under_way() -> tuple[str, bool]:
    """Why a step refuses a model that was loaded alone; whether the fragment is forgotten with the counts."""
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), EVERY, **PLANS[3])
    for step in range(EVERY):
        optimizer.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
    assert optimizer._fragments.is_under_way
    fresh = mlp()
    model.load_state_dict(fresh.state_dict())
    with pytest.raises(PoseidonError, match="a fragment under way") as error:
        optimizer.step()
    optimizer.load_state_dict(adamw(fresh).state_dict())
    gone = not optimizer._fragments.is_under_way
    optimizer.step()
    return str(error.value), gone


def test_a_model_is_not_mixed_with_a_fragment_of_before() -> None:
    assert all(gone and "push_parameters" in text for text, gone in workers.run(RANKS, loaded_while_under_way))


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("at", [3, 4, 5, 7])
def test_a_checkpoint_goes_on_also_with_a_fragment_under_way(at: int, outer: bool) -> None:
    for whole, resumed, text in workers.run(RANKS, continued, outer, PLANS[3], at):
        assert resumed == whole
        assert "other fragments" in text


@pytest.mark.parametrize("kind", ["adamw local streaming dropout", "sgd local outer streaming dropout"])
def test_after_failures_every_rank_has_the_bits_without(tmp_path: Path, kind: str) -> None:
    answers = []
    for name, faults in (
        ("whole", []),
        ("cut", [Fault(1, 2, "backward"), Fault(1, 4, "after step"), Fault(2, 7, "between"), Fault(0, 8, "forward")]),
    ):
        (tmp_path / name).mkdir()
        watching = Supervisor(tmp_path / name, RANKS)
        answers.append(watching.run(train_in_attempts, kind, 10, faults, str(tmp_path / name / "snapshots")))
        assert watching.restarted == len(faults)
    whole, cut_short = answers
    assert [answer["digest"] for answer in cut_short] == [answer["digest"] for answer in whole]
    assert len({answer["digest"] for answer in whole}) == RANKS


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 5}, "fragments is 5"),
        ({"fragments": True}, "fragments is True"),
        ({"fragments": 2, "overlap_steps": 3}, "from 0 to 2"),
        ({"overlap_steps": -1}, "overlap_steps is -1"),
        ({"mix": 0.5}, "mix is 0.5"),
        ({"overlap_steps": 1, "mix": 1.0}, "mix is 1.0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(plan: dict[str, Any], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match=said):
        poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), EVERY, **plan)


def too_many() -> str:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgument) as error:
        poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), EVERY, fragments=3)
    return str(error.value)


def test_a_fragment_has_a_parameter() -> None:
    for text in workers.run(2, too_many):
        assert "fragments is 3, and the model has 2 parameters" in text
