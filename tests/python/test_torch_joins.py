"""What runs beside a joined model, and what is refused: on all ranks at once, and not when a timeout is over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, Mismatch
from torch_cases import all_equal, mlp, parameters_digest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
QUICK_S = 10.0  # far below the timeout of a job


class Trainer:
    """A wrapped model and its optimizer."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        self.model = poseidon.DistributedDataParallel(module or mlp(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + poseidon.rank())
        self.model(torch.randn(4, 48, generator=generator)).square().mean().backward()
        self.optimizer.step()


def in_job(with_torch: bool, case: Callable[..., Any], *args: Any) -> Any:
    """Runs the case in a job; what it raises is its answer, and how long it took."""
    if with_torch:
        dist.init_process_group("gloo")
    poseidon.init()
    begin = time.monotonic()
    try:
        case(*args)
    except (InvalidArgument, Mismatch) as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def refused(world_size: int, with_torch: bool, case: Callable[..., Any], *args: Any) -> str:
    """The error of the case, which has to be the same on all ranks, and to come soon."""
    answers = workers.run_fresh(world_size, in_job, with_torch, case, *args, TORCH_GLOO_LAZY_INIT="0")
    assert all(isinstance(answer, tuple) for answer in answers), answers
    texts, seconds = zip(*answers, strict=True)
    assert all_equal(texts), texts
    assert max(seconds) < QUICK_S
    return str(texts[0])


class Beside:
    """Something that takes all ranks, beside the steps of the joined model."""

    def __init__(self, kind: str) -> None:
        normed = nn.Sequential(nn.Linear(48, 16), nn.BatchNorm1d(16))
        if kind == "LocalSGD":
            self._module = mlp()
            self._local = poseidon.LocalSGD(self._module, torch.optim.SGD(self._module.parameters(), lr=0.1), 2)
            self.run = self._average
        elif kind == "barrier":
            self.run = lambda _: poseidon.barrier()
        elif kind == "all_reduce":
            self.run = lambda number: poseidon.all_reduce(number)
        elif kind == "another model":
            self.run = lambda number: Trainer().step(number)
        else:
            self.run = Trainer(normed if kind == "buffers" else None).step

    def _average(self, number: int) -> None:
        self._module(torch.ones(1, 48)).sum().backward()
        self._local.step()


def beside(kind: str, before: bool, shortest: int, counts_equal: bool = False) -> None:
    joined, other = Trainer(), Beside(kind)
    with joined.model.join():
        for number in range(2 if poseidon.rank() == shortest and not counts_equal else 4):
            for step in (other.run, joined.step) if before else (joined.step, other.run):
                step(number)


TEXTS = {
    "model": "a step of another model",
    "buffers": "a step of another model",
    "LocalSGD": "an averaging of LocalSGD",
    "barrier": r"a call that takes all ranks, such as barrier\(\)",
    "all_reduce": r"a call that takes all ranks, such as barrier\(\)",
    "another model": r"a call that takes all ranks, such as barrier\(\)",
}


@pytest.mark.parametrize("with_torch", [False, True], ids=["alone", "with torch"])
@pytest.mark.parametrize("before", [False, True], ids=["after it", "before it"])
@pytest.mark.parametrize("kind", TEXTS)
def test_what_takes_all_ranks_is_refused_when_one_has_no_data(kind: str, before: bool, with_torch: bool) -> None:
    for shortest in (0, 1) if kind == "buffers" else (1,):
        text = refused(2, with_torch, beside, kind, before, shortest)
        assert text.startswith(TEXTS[kind].replace("\\", "")), text
        assert "and a rank without data in join() exclude each other" in text


def after_its_data(kind: str) -> None:
    joined, other = Trainer(), Beside(kind)
    with joined.model.join():
        for number in range(2 + 2 * poseidon.rank()):
            joined.step(number)
        for number in range(2 - 2 * poseidon.rank()):
            other.run(number)


@pytest.mark.parametrize("with_torch", [False, True], ids=["alone", "with torch"])
@pytest.mark.parametrize("kind", ["model", "LocalSGD", "barrier"])
def test_it_is_refused_of_a_rank_that_has_used_its_data(kind: str, with_torch: bool) -> None:
    text = refused(2, with_torch, after_its_data, kind)
    assert text.startswith(TEXTS[kind].replace("\\", "")), text


@pytest.mark.parametrize("with_torch", [False, True], ids=["alone", "with torch"])
@pytest.mark.parametrize("kind", TEXTS)
def test_it_runs_where_all_ranks_have_data(kind: str, with_torch: bool) -> None:
    assert refused(2, with_torch, beside, kind, True, 0, True) == ""


def nested(outer: str, inner: str) -> None:
    def begin(kind: str, trainer: Trainer) -> AbstractContextManager[Any]:
        return trainer.model.join() if kind == "join" else Join([trainer.model])

    first, second = Trainer(), Trainer()
    with begin(outer, first), begin(inner, second):
        pass


@pytest.mark.parametrize("kinds", [("join", "join"), ("join", "Join"), ("Join", "join"), ("Join", "Join")], ids=str)
def test_one_join_in_another_is_refused(kinds: tuple[str, str]) -> None:
    assert refused(2, True, nested, *kinds).startswith("join() of another model and join() exclude each other")


def both_joined() -> None:
    first, second = Trainer(), Trainer()
    for _ in range(2):  # a Join that is over leaves nothing behind
        with Join([first.model, second.model]):
            for number in range(2 + 2 * poseidon.rank()):
                first.step(number)
                second.step(number)
    for one in (first, second):
        assert all_equal(poseidon.all_gather(int(parameters_digest(one.model)[:8], 16)))


def used_again(counts: list[tuple[int, int]], of_model: bool, kept: bool) -> None:
    """One Join for several epochs, with steps outside of it between them."""
    first, second = Trainer(), Trainer()
    join = first.model.join() if of_model else Join([first.model, second.model])
    for epoch, count in enumerate(counts):
        with join:
            for number in range(count[poseidon.rank()]):
                first.step(number)
                None if of_model else second.step(number)
        first.step(100 + epoch)
        poseidon.barrier()
    if not kept and poseidon.rank() == 0:
        del join  # whether an object lives is not the same on all ranks
    with Join([second.model, first.model]):  # takes the place of the first
        for number in range(1 + poseidon.rank()):
            second.step(number)
            first.step(number)
    second.model.set_weight(4)  # nobody runs out of data any more
    second.step(200)
    for one in (first, second):
        assert all_equal(poseidon.all_gather(int(parameters_digest(one.model)[:8], 16)))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("of_model", [False, True])
def test_a_join_may_be_used_again(of_model: bool, kept: bool) -> None:
    assert refused(2, True, used_again, [(2, 3), (0, 2), (0, 0), (4, 2)], of_model, kept) == ""


def beside_one_that_is_over(shortest: int) -> None:
    """A step of a model whose own Join is over, in the join of another one."""
    first, second = Trainer(), Trainer()
    over = Join([first.model])
    with over:
        first.step(0)
    with second.model.join():
        for number in range(2 if poseidon.rank() == shortest else 4):
            first.step(number)
            second.step(number)


def test_the_joined_model_of_a_join_that_is_over_is_another_model() -> None:
    assert refused(2, True, beside_one_that_is_over, -1) == ""
    assert refused(2, True, beside_one_that_is_over, 0).startswith("a step of another model and a rank without data")


def thrown(after: str) -> None:
    """An epoch that ends by an error when a rank has no data, and what a program does then."""
    one, errors = Trainer(), []
    for epoch in range(2):
        join = Join([one.model], throw_on_early_termination=True)
        try:
            with join:
                for number in range(2 + poseidon.rank()):
                    one.step(number)
        except RuntimeError as error:
            if after == "inside":
                one.step(10)
            elif after == "keep":
                errors.append(error)
            elif after == "barrier":
                poseidon.barrier()
            elif after == "let go":
                del join
        one.step(20 + epoch)
    assert all_equal(poseidon.all_gather(int(parameters_digest(one.model)[:8], 16)))


@pytest.mark.parametrize("after", ["inside", "keep", "barrier", "let go", "nothing"])
def test_training_goes_on_after_a_rank_that_had_no_data_raised(after: str) -> None:
    assert refused(2, True, thrown, after) == ""


def test_two_models_in_one_join() -> None:
    assert refused(2, True, both_joined) == ""


def not_first() -> None:
    joined, other = Trainer(), Trainer()
    optimizer = ZeroRedundancyOptimizer(joined.model.parameters(), torch.optim.SGD, lr=0.05)
    with Join([optimizer, joined.model]):
        other.step(0)


def test_ranks_that_cannot_be_told_of_another_step_are_not_left_to_wait() -> None:
    assert refused(2, True, not_first).startswith("a step of another model and join() exclude each other")


def in_group() -> None:
    group = dist.new_group([0, 1])
    joined = Trainer()
    part = Trainer(process_group=group) if poseidon.rank() < 2 else None
    with joined.model.join():
        joined.step(0)
        if part is None:
            raise InvalidArgument(os.environ["EXPECTED"])
        part.step(0)


def test_a_model_of_a_process_group_is_refused_in_a_join_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (
        "a step of another model and join() exclude each other: a step of another model takes all ranks, and join() "
        "lets ranks, and rank 0 too, run out of data; give every rank as many batches, or use "
        "torch.distributed.algorithms.Join([model, other]), which joins both"
    )
    monkeypatch.setenv("EXPECTED", expected)
    assert refused(3, True, in_group) == expected


def disabled(kind: str) -> None:
    if kind == "drop":
        poseidon.shutdown()
        poseidon.init(stragglers="drop")
    one = Trainer()
    for context in (Join([one.model], enable=False), one.model.join(enable=False)):
        with context:
            for number in range(3):
                if kind == "weight":
                    one.model.set_weight(4)
                one.step(number)
    one.model.set_weight(3) if kind == "after" else None
    one.step(3)


@pytest.mark.parametrize("kind", ["plain", "weight", "drop", "after"])
def test_a_disabled_join_does_nothing(kind: str) -> None:
    assert refused(2, True, disabled, kind) == ""


def evaluates(with_buffers: bool, ranks: tuple[int, ...] = (0, 1)) -> None:
    joined = Trainer(nn.Sequential(nn.Linear(48, 16), nn.BatchNorm1d(16)) if with_buffers else None)
    with joined.model.join():
        for number in range(2 + 2 * poseidon.rank()):
            joined.step(number)
            if poseidon.rank() in ranks:
                with torch.no_grad():
                    joined.model(torch.ones(2, 48))


@pytest.mark.parametrize("with_torch", [False, True], ids=["alone", "with torch"])
@pytest.mark.parametrize("with_buffers", [False, True], ids=["no buffers", "buffers"])
def test_ranks_with_data_may_evaluate(with_buffers: bool, with_torch: bool) -> None:
    assert refused(2, with_torch, evaluates, with_buffers) == ""


@pytest.mark.parametrize("with_torch", [False, True], ids=["alone", "with torch"])
def test_buffers_of_an_evaluation_on_one_rank_are_an_error_at_once(with_torch: bool) -> None:
    assert refused(2, with_torch, evaluates, False, (1,)) == ""
    text = refused(2, with_torch, evaluates, True, (1,))
    assert "rank 0: to exchange gradients, after buffers; rank 1: without exchange, after buffers" in text
