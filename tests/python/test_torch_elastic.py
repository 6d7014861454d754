"""ElasticSampler: every example exactly once an epoch, whoever comes and goes."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import poseidon.torch as poseidon
import workers
from poseidon.adapter.elastic_order import ElasticOrder
from poseidon.errors import InvalidArgument
from poseidon.torch import elastic
from poseidon.torch.process.context import context
from recovery_cases import Fault, Faults, Supervisor

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

Place = Callable[[int, int], None]
EXAMPLES, ROWS = 53, 3
FIRST = [6, 8, 0, 9, 3, 1, 4, 2, 7, 5]
FAR = [291276258443, 972786607151, 455116493446]


@pytest.fixture
def place() -> Iterator[Place]:
    """Says which worker this is, of how many, without a job."""
    here = mock.Mock(recovers=False)
    with mock.patch.object(elastic, "context", return_value=here):

        def put(rank: int, size: int) -> None:
            here.data_part = (rank, size)

        put(0, 1)
        yield put


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 65, 1000, (1 << 16) + 1, 1 << 17])
def test_an_epoch_is_a_permutation(count: int) -> None:
    order = ElasticOrder(count, seed=3)
    epochs = [order.examples(epoch, 0, count).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count > 5:
        assert epochs[0] != epochs[1] != epochs[2] != ElasticOrder(count, seed=4).examples(0, 0, count).tolist()
    assert order.examples(1, count // 3, count).tolist() == epochs[1][count // 3 :]
    assert ElasticOrder(count, 3, shuffle=False).examples(1, 0, count).tolist() == list(range(count))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ElasticOrder(10, seed=0).examples(0, 0, 10).tolist() == FIRST
    assert ElasticOrder(1 << 40, seed=5).examples(7, 0, 3).tolist() == FAR


def test_every_example_comes_anywhere() -> None:
    """Each position has each of 8 examples about equally often, and so has each pair of neighbours."""
    epochs = 4000
    orders = np.array([ElasticOrder(8, seed=1).examples(epoch, 0, 8) for epoch in range(epochs)])
    for position in range(8):
        counts = np.bincount(orders[:, position], minlength=8)
        assert ((counts - epochs / 8) ** 2 / (epochs / 8)).sum() < 30, "chi-square of 7 degrees: 1 in 10,000"
    pairs = np.bincount((orders[:, 3] * 8 + orders[:, 4]).astype(np.int64), minlength=64).reshape(8, 8)
    expected = epochs / 56
    assert (np.square(pairs[~np.eye(8, dtype=bool)] - expected) / expected).sum() < 105, "of 55 degrees"


def test_every_example_of_many_comes_anywhere() -> None:
    count, epochs = 70001, 2000
    found = np.array([ElasticOrder(count, seed=1).examples(epoch, 5, 7) for epoch in range(epochs)])
    counts = np.bincount(found[:, 0] * 16 // count, minlength=16)
    assert ((counts - epochs / 16) ** 2 / (epochs / 16)).sum() < 45, "chi-square of 15 degrees"
    assert abs(np.corrcoef(found[:, 0], found[:, 1])[0, 1]) < 4 / epochs**0.5


@pytest.mark.parametrize("number", range(60))
def test_every_example_once_in_any_history(number: int, place: Place) -> None:
    """Workers come and go between steps, and some steps fail."""
    draw = random.Random(number)
    count, rows = draw.randint(6, 200), draw.randint(1, 9)
    state = elastic.ElasticSampler(count, rows, seed=number).state_dict()
    order = elastic.ElasticOrder(count, number)
    size, seen = draw.randint(1, 6), Counter[int]()
    while state["epoch"] < 3:
        taken, after = [], []
        for rank in range(size):
            place(rank, size)
            sampler = elastic.ElasticSampler(count, rows, seed=number)
            sampler.load_state_dict(state)
            batch = sampler.batch()
            assert 1 <= len(batch) <= rows + 1
            assert next(iter(sampler)) == batch
            taken += batch
            sampler.advance()
            after.append(sampler.state_dict())
        assert after == [after[0]] * size
        if draw.random() < 0.3:  # the step fails, and workers may be lost or come
            size = draw.randint(1, 6)
            continue
        seen.update(taken)
        state = after[0]
        assert seen == past(order, state["epoch"], state["position"])
        size = draw.randint(1, 6) if draw.random() < 0.3 else size


def past(order: elastic.ElasticOrder, epochs: int, position: int) -> Counter[int]:
    """How often each example was taken after so many epochs, and up to this position of the next one."""
    found = Counter(dict.fromkeys(range(order.example_count), epochs))
    return +(found + Counter(order.examples(epochs, 0, position).tolist()))


def test_its_length_is_the_number_of_its_batches(place: Place) -> None:
    for size in (1, 2, 3, 5):
        place(size - 1, size)
        for position in range(0, 50, 7):
            sampler = elastic.ElasticSampler(60, 4)
            sampler.position = position
            assert len(sampler) == len(list(sampler))


class Numbers(Dataset[torch.Tensor]):
    """Example i is i."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("processes", [0, 2])
def test_what_was_loaded_ahead_is_dealt_again(processes: int, place: Place) -> None:
    place(1, 3)
    sampler = elastic.ElasticSampler(EXAMPLES, ROWS, seed=2)
    loader = elastic.ElasticLoader(Numbers(), sampler, num_workers=processes)

    def check() -> None:
        expected, stream = sampler.batch(), torch.get_rng_state()
        assert next(loader).tolist() == expected
        assert torch.equal(torch.get_rng_state(), stream)

    check()
    check()
    place(0, 2)  # one worker is lost
    check()
    before = sampler.state_dict()
    check()
    sampler.load_state_dict(before)  # the step has failed
    check()
    while sampler.epoch < 2:
        check()


class Failing(Numbers):
    """Cannot be read once in a while."""

    def __init__(self) -> None:
        self.fails = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise OSError("not now")
        return super().__getitem__(index)


def test_a_batch_that_could_not_be_loaded_comes_again(place: Place) -> None:
    sampler, data = elastic.ElasticSampler(EXAMPLES, ROWS), Failing()
    loader = elastic.ElasticLoader(data, sampler)
    next(loader)
    expected, data.fails = sampler.batch(), True
    with pytest.raises(OSError, match="not now"):
        next(loader)
    assert next(loader).tolist() == expected


class Noisy(Numbers):
    """Draws a number for each example."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_processes_that_load_draw_other_numbers_on_each_rank(place: Place) -> None:
    def drawn(rank: int, seed: int) -> list[float]:
        place(rank, 2)
        return next(
            elastic.ElasticLoader(Noisy(), elastic.ElasticSampler(EXAMPLES, ROWS, seed), num_workers=1)
        ).tolist()

    first = drawn(0, 1)
    assert first == drawn(0, 1)
    assert first != drawn(1, 1)
    assert first != drawn(0, 2)


def test_a_copy_was_not_given_to_recovery(place: Place) -> None:
    sampler = elastic.ElasticSampler(EXAMPLES, ROWS)
    sampler.is_recovered = True
    assert not copy.deepcopy(sampler).is_recovered
    assert not copy.copy(sampler).is_recovered


def test_wrong_use_is_refused(place: Place) -> None:
    with pytest.raises(InvalidArgument, match="the dataset has 0 examples"):
        elastic.ElasticSampler(0, 4)
    with pytest.raises(InvalidArgument, match="batch_size is 0"):
        elastic.ElasticSampler(9, 0)
    sampler = elastic.ElasticSampler(3, 1)
    place(0, 4)
    with pytest.raises(InvalidArgument, match="has 3 examples for 4 workers"):
        sampler.batch()
    with pytest.raises(InvalidArgument, match="with the same dataset, seed and shuffle"):
        sampler.load_state_dict(elastic.ElasticSampler(4, 1).state_dict())
    with pytest.raises(InvalidArgument, match="ElasticLoader got shuffle"):
        elastic.ElasticLoader(Numbers(), sampler, shuffle=True)
    with pytest.raises(InvalidArgument, match="in_order=False would count"):
        elastic.ElasticLoader(Numbers(), sampler, in_order=False)
    with pytest.raises(InvalidArgument, match="whose examples have no numbers"):
        elastic.ElasticSampler(iter([1]), 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="seed is None: it must be a whole number"):
        elastic.ElasticSampler(9, 1, seed=None)  # type: ignore[arg-type]


# In a job.


def deal(folder: Path, kind: str, epochs: int, faults: Sequence[Fault]) -> list[int]:
    """Trains so many epochs, and notes in files which examples each step took, in each generation of the job.

    Returns where the sampler is then.
    """
    dies = Faults(folder, faults)
    poseidon.init()
    torch.manual_seed(1)
    model = poseidon.DistributedDataParallel(nn.Linear(1, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
    if kind == "overlap":
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    sampler = poseidon.ElasticSampler(Numbers(), ROWS, seed=4)
    loader = poseidon.ElasticLoader(Numbers(), sampler)
    recovery = poseidon.Recovery(model, optimizer, sampler, seed=0)
    rank = context().settings.rank
    while sampler.epoch < epochs or recovery.until(recovery.step):
        with recovery.attempt():
            step, generation = recovery.step, context().present_client.generation
            batch = next(loader)
            (folder / f"taken-{step}-{generation}-{rank}").write_text(json.dumps(batch.tolist()))
            model.set_weight(len(batch))
            optimizer.zero_grad()
            dies.reached("forward", step)
            model(batch[:, None].float()).square().mean().backward()
            optimizer.step()
            dies.reached("after step", step)
    poseidon.shutdown()
    return [sampler.epoch, sampler.position]


@pytest.mark.parametrize(
    ("kind", "on_failure", "faults"),
    [
        ("plain", "rejoin", [Fault(1, 3, "forward"), Fault(2, 8, "after step")]),
        ("overlap", "shrink", [Fault(2, 2, "after step"), Fault(0, 7, "forward")]),
        ("plain", "shrink", [Fault(0, 4, "after step"), Fault(1, 5, "forward", delay=0.01)]),
    ],
)
def test_every_example_once_with_lost_workers(tmp_path: Path, kind: str, on_failure: str, faults: list[Fault]) -> None:
    supervisor = Supervisor(tmp_path, 3, POSEIDON_ON_FAILURE=on_failure)
    answers = [answer for answer in supervisor.run(deal, kind, 3, faults) if answer is not None]
    assert supervisor.restarted == len(faults)
    assert answers == [answers[0]] * len(answers)
    found: dict[int, dict[int, list[int]]] = {}
    for path in tmp_path.glob("taken-*"):
        _, step, generation, _ = path.name.split("-")
        found.setdefault(int(step), {}).setdefault(int(generation), []).extend(json.loads(path.read_text()))
    # Whoever was lost has not made the step that counts.
    seen = Counter(example for taken in found.values() for example in taken[max(taken)])
    assert seen == past(elastic.ElasticOrder(EXAMPLES, 4), *answers[0])


def differing() -> str:
    """What the ranks are told of which one has taken a batch more than the other."""
    poseidon.init()
    rank = poseidon.rank()
    model = poseidon.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = poseidon.ElasticSampler(EXAMPLES, ROWS)
    recovery = poseidon.Recovery(model, optimizer, sampler)
    try:
        for step in range(3):
            with recovery.attempt():
                sampler.advance()
                if rank == step == 1:
                    sampler.advance()
                model(torch.ones(2, 1)).sum().backward()
                optimizer.step()
    except poseidon.PoseidonError as error:
        return str(error)
    return ""


def test_ranks_that_take_different_batches_are_told() -> None:
    # In processes of their own: as long as the sampler lives, its place is compared with each exchange.
    for text in workers.run_fresh(2, differing):
        assert "the ranks differ in the place of an ElasticSampler" in text


def unrecovered(folder: Path) -> list[str]:
    """What a program is told that takes batches where a failure would lose them."""
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given, other = poseidon.ElasticSampler(EXAMPLES, ROWS), poseidon.ElasticSampler(EXAMPLES, ROWS)
    recovery = poseidon.Recovery(model, optimizer, given)
    texts = []
    for advance, inside in ((given.advance, False), (other.advance, True)):
        try:
            if not inside:
                advance()
            with recovery.attempt():
                advance()
        except InvalidArgument as error:
            texts.append(str(error))
    context().leave()
    return texts


def test_batches_that_a_failure_would_lose_are_refused(tmp_path: Path) -> None:
    for texts in Supervisor(tmp_path, 2).run(unrecovered):
        assert len(texts) == 2
        assert all("take batches inside its attempts" in text for text in texts)
