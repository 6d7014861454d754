"""Checkpoints of servers with several models in one job: a version is one moment of the program."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.optim import SGD

import poseidon.torch as torch_poseidon
import workers
from poseidon.adapter.saved_steps import SavedSteps
from poseidon.errors import InvalidArgument, Mismatch, PoseidonError
from server_process import server_process
from torch_cases import all_equal, parameters_digest
from waiting import wait_until

_core = pytest.importorskip("poseidon._core", reason="the compiled core is not built")
DRAWS = [
    "AB A AB A AB A A",
    "AAB AAB AAB AAB",
    "AAA BBBB AAA BB",
    "AB AB AB AB",
    "BA A A A BA A A",
    "AJ AJJ J AAJ",
    "AK BBJ K AB J",
]
"""Iterations of programs that train two models: which model steps, in which order. J and K: both get their gradients
from one backward pass, which comes to B first or to A."""


class Trainer:
    """A model on servers."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.model = torch_poseidon.DistributedDataParallel(module)
        inner = SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = torch_poseidon.DistributedOptimizer(inner, self.model, update="server", **options)
        self.draws = torch.Generator().manual_seed(seed + torch_poseidon.rank())

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.model(torch.randn(4, 8, generator=self.draws)).square().mean()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()

    def digest(self) -> str:
        self.optimizer.synchronize()
        return parameters_digest(self.model)


def trained(program: str) -> list[list[str]]:
    """The digests of both models at every moment between two steps."""
    both = {name: Trainer(seed) for seed, name in enumerate("AB")}
    moments = [[one.digest() for one in both.values()]]
    for names in program.replace(" ", ""):
        steppers = [both[name] for name in {"J": "AB", "K": "BA"}.get(names, names)]
        torch.stack([one.loss() for one in steppers]).sum().backward()
        for one in steppers:
            one.optimizer.step()
        moments.append([one.digest() for one in both.values()])
    return moments


def resumed() -> tuple[list[int], list[str]]:
    both = [Trainer(seed + 7, resume=True) for seed in range(2)]
    return [one.optimizer.resumed_version for one in both], [one.digest() for one in both]


def complete_versions(directory: Path) -> list[int]:
    return [one.version for one in _core.list_checkpoints(str(directory), True) if one.complete]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("program", DRAWS)
def test_models_that_step_at_different_rates_go_on_from_one_moment(tmp_path: Path, program: str, every: int) -> None:
    options = {
        "checkpoint_dir": str(tmp_path),
        "checkpoint_every": every,
        "job": "two",
        "small_bytes": 4096 * (every - 1),
    }
    moments = workers.run(2, trained, program, **options)
    assert all_equal(moments)
    wait_until(lambda: bool(complete_versions(tmp_path)), lambda: "no version is complete")
    answers = workers.run(3, resumed, **options)
    assert all_equal(answers)
    versions, digests = answers[0]
    assert versions[0] == versions[1] > 0
    assert digests in moments[0][1:]


def test_workers_hear_that_dedicated_servers_save(tmp_path: Path) -> None:
    """They have no checkpoint_dir of their own."""
    saving = ("--checkpoint-dir", str(tmp_path), "--checkpoint-every", "1")
    with server_process(*saving) as (_, first), server_process(*saving) as (_, second):
        options = {"POSEIDON_SERVERS": f"{first},{second}", "POSEIDON_JOB": "two"}
        moments = workers.run_fresh(2, in_job, trained, DRAWS[0], **options)
        wait_until(lambda: bool(complete_versions(tmp_path)), lambda: "no version is complete")
        versions, digests = workers.run_fresh(2, in_job, resumed, **options)[0]
        assert versions[0] == versions[1] > 0
        assert digests in moments[0][1:]
        options["POSEIDON_JOB"] = "of_no_use"
        assert workers.run_fresh(2, in_job, of_no_use, **options) == [None, None]


def in_job(function: Callable[..., Any], *args: Any) -> Any:
    torch_poseidon.init()
    return function(*args)


def of_no_use() -> None:
    """What a program may do that has not asked servers to save, though they do."""
    for step in range(2):
        with pytest.warns(UserWarning, match="not of one step") if step else nullcontext():
            trainer = Trainer(step)
        trainer.step()
        trainer.step()
    model = torch.nn.Linear(4, 2)
    outer = torch_poseidon.OuterNesterov(lr=0.7, momentum=0.9)
    with pytest.warns(UserWarning, match="another job name"):
        torch_poseidon.LocalSGD(model, SGD(model.parameters(), lr=0.1), every=2, outer=outer)


def resumed_in_part() -> str:
    Trainer(7, resume=True)
    try:
        Trainer(8)
    except Mismatch as error:
        return str(error)
    return ""


def test_one_model_alone_is_not_resumed(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 1, "job": "part"}
    workers.run(2, trained, "AB AB AB", **options)
    wait_until(lambda: bool(complete_versions(tmp_path)), lambda: "no version is complete")
    answers = workers.run(3, resumed_in_part, **options)
    assert all_equal(answers)
    assert "pass resume=True to all of them" in answers[0]


def later_model() -> None:
    Trainer(0).step()
    with pytest.raises(InvalidArgument, match="before the first step, or leave checkpoint_dir out"):
        Trainer(1)


def test_a_later_model_is_refused(tmp_path: Path) -> None:
    workers.run(2, later_model, checkpoint_dir=str(tmp_path))


def apart(program: str) -> str:
    """Steps of several models where ranks are in different steps; in lower case ones that this rank has missed."""
    both = {name: Trainer(seed) for seed, name in enumerate("AB")}
    try:
        for name in program:
            one = both[name.upper()]
            if name.isupper():
                one.step()
            else:
                one.optimizer.zero_grad()
                one.model.synchronizer.exchange_nothing(missed=True)
                one.optimizer.step()
    except InvalidArgument as error:
        return str(error)
    return ""


def test_models_at_different_rates_are_refused_where_ranks_are_in_different_steps(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 1, "job": "two", "stragglers": "drop"}
    for answer in workers.run(2, apart, "ABABAA", **options):
        assert "at the same rate" in answer
    assert workers.run(2, apart, "ABABBAaabbAB", **{**options, "job": "other"}) == ["", ""]


def different_order() -> str:
    """Rank 0 makes two steps of one model where the others make one of each. The error; empty if there is none."""
    torch_poseidon.init(checkpoint_dir=os.environ["DIRECTORY"])
    both = {name: Trainer(seed) for seed, name in enumerate("AB")}
    try:
        for name in "AABB" if torch_poseidon.rank() == 0 else "ABAB":
            both[name].step()
            both[name].digest()
    except PoseidonError as error:
        return str(error)
    return ""


def test_models_in_another_order_on_one_rank_are_an_error(tmp_path: Path) -> None:
    answers = workers.run_fresh(2, different_order, DIRECTORY=str(tmp_path))
    assert all("order" in str(answer) for answer in answers), answers


def other_settings(options: dict[str, Any], resume: bool) -> str:
    """The error where ranks other than 0 have these settings."""
    first = int(os.environ["RANK"]) == 0
    torch_poseidon.init(**({"checkpoint_dir": os.environ["DIRECTORY"]} if first else options))
    with pytest.raises(Mismatch) as found:
        Trainer(0, resume=resume and first)
    return str(found.value)


@pytest.mark.parametrize(
    ("options", "resume", "text"),
    [
        ({}, False, "rank 1 has 'no checkpoint_dir, resume=False'"),
        ({"checkpoint_dir": "elsewhere", "checkpoint_every": 7}, False, "checkpoint_every=7"),
        ({"checkpoint_dir": "elsewhere"}, True, "resume=False"),
    ],
    ids=["no directory", "another interval", "no resume"],
)
def test_settings_of_checkpoints_on_one_rank_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], resume: bool, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = workers.run_fresh(2, other_settings, options, resume, DIRECTORY=str(tmp_path / "there"))
    assert all(text in str(answer) for answer in answers), answers
    assert answers[0] == answers[1]


def test_models_go_on_from_one_version() -> None:
    saved = SavedSteps(Mock(), [], True, True)
    saved.resumed(4)
    saved.resumed(4)
    with pytest.raises(Mismatch, match="from version 4 in checkpoint_dir and another one from version 2"):
        saved.resumed(2)
