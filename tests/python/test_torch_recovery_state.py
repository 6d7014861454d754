"""The parts of recovery that need no second process: state as text, copies, random streams, snapshots."""

from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poseidon.torch as poseidon
from poseidon.adapter.snapshots import Snapshots
from poseidon.adapter.state_text import array_kinds, decode, encode
from poseidon.torch.optimizer.undo import TensorCopies, UpdateUndo
from poseidon.torch.recovery.objects import StreamStates, seed_streams
from poseidon.torch.tensors.arrays import DTYPES, TENSORS
from recovery_cases import Fault, Supervisor, train
from test_torch_recovery import STEPS, recovered, undisturbed


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_state_comes_back_from_text_and_tensors() -> None:
    state = {
        "plain": [None, True, -3, 0.1, float("inf"), 5e-324, "a\nb"],
        "kinds": ((), (1, "x"), {1, 2}, b"\x00\xff", torch.float32, Counter({7: 2}), OrderedDict(b=1, a=2)),
        3: {(1, 2): {}},
        "tensors": [torch.ones((2, 3), dtype=dtype) for dtype in DTYPES.values()] + [torch.tensor(4.0), torch.empty(0)],
    }
    text, tensors = encode(state, TENSORS)
    kinds = array_kinds(text, TENSORS)
    assert [(DTYPES[name], shape) for name, shape in kinds] == [(t.dtype, tuple(t.shape)) for t in tensors]
    assert same(decode(text, tensors, TENSORS), state)


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_sparse_tensor_comes_back_as_it_was(coalesced: bool) -> None:
    """With the order of its rows, which decides the bits of an update that adds them up."""
    sparse = torch.sparse_coo_tensor(
        [[3, 0, 3]], torch.tensor([[1.0, 2], [3, 4], [5, 6]]), (4, 2), check_invariants=True
    )
    sparse = sparse.coalesce() if coalesced else sparse
    text, tensors = encode({"momentum": [sparse]}, TENSORS)
    found = decode(text, [TENSORS.copy(tensor) for tensor in tensors], TENSORS)["momentum"][0]
    assert found.is_coalesced() == coalesced
    assert found.shape == sparse.shape
    assert torch.equal(found._indices(), sparse._indices())
    assert torch.equal(found._values(), sparse._values())


@pytest.mark.parametrize("value", [print, object(), torch.zeros(2, 2).to_sparse_csr(), 1j, np.zeros(2)])
def test_what_is_no_plain_data_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(poseidon.PoseidonError, match=r"state\['a'\]\[1\] is a "):
        encode({"a": [1, value]}, TENSORS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tensors": [["load", [1]]], "value": 1}',
        '{"tensors": [["float32", [-1]]], "value": 1}',
        '{"tensors": [], "value": {"system": "ls"}}',
        '{"tensors": [], "value": {"tensor": 5}}',
        '{"tensors": [], "value": {"dtype": "load"}}',
        '{"tensors": [], "value": {"parts": [1, 2]}}',
        '{"tensors": [], "value": {"parts": [1, 2, [3], true]}}',
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(text, [torch.zeros(shape, dtype=DTYPES[name]) for name, shape in array_kinds(text, TENSORS)], TENSORS)


def test_schedulers_of_torch_have_states_that_can_be_sent() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    kinds = torch.optim.lr_scheduler
    for scheduler in (
        kinds.MultiStepLR(optimizer, [2, 2, 5]),
        kinds.OneCycleLR(optimizer, 0.1, total_steps=10),
        kinds.CosineAnnealingWarmRestarts(optimizer, 4),
        kinds.ReduceLROnPlateau(optimizer),
        kinds.LambdaLR(optimizer, lambda step: 0.9**step),
        kinds.SequentialLR(optimizer, [kinds.ConstantLR(optimizer), kinds.ExponentialLR(optimizer, 0.9)], [3]),
        kinds.CyclicLR(optimizer, 0.1, 0.2),
        kinds.PolynomialLR(optimizer),
    ):
        text, tensors = encode(scheduler.state_dict(), TENSORS)
        scheduler.load_state_dict(decode(text, tensors, TENSORS))
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, kinds.ReduceLROnPlateau) else scheduler.step()


def trained(make: Any, steps: int) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = make(params)
    for step in range(steps):
        one_step(params, optimizer, step)
    return params, optimizer


def one_step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    for param in params:
        param.grad = torch.full_like(param, 0.1 * step + 1)
    optimizer.step()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        torch.optim.AdamW,
        torch.optim.Rprop,
        lambda params: torch.optim.ASGD(params, 0.1),
    ],
)
def test_an_update_is_undone(make: Any, before: int) -> None:
    params, optimizer = trained(make, before)
    undo = UpdateUndo(optimizer)
    for number in (before, before + 1):  # the second time it uses its memory again
        undo.save(params, number)
        undo.save(params[:1], number)
        one_step(params, optimizer, number)
    assert undo.reaches(before + 1, {})
    assert not undo.reaches(before, {})
    assert not undo.reaches(before + 1, {params[0]: before})
    undo.go_back(before + 1)
    expected, other = trained(make, before + 1)
    assert all(map(torch.equal, params, expected))
    text, tensors = encode(optimizer.state_dict(), TENSORS)
    wanted_text, wanted = encode(other.state_dict(), TENSORS)
    assert text == wanted_text
    assert all(map(torch.equal, tensors, wanted))


def test_tensors_are_put_back() -> None:
    tensors = [torch.arange(3.0), torch.ones(2, 2, dtype=torch.int64)]
    copies = TensorCopies()
    for _ in range(2):
        copies.take(tensors)
        for tensor in tensors:
            tensor.add_(1)
    copies.put_back(tensors)
    assert tensors[0].tolist() == [1, 2, 3]
    assert tensors[1].tolist() == [[2, 2], [2, 2]]


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_random_streams_are_seeded_and_put_back() -> None:
    seed_streams(1, 0, 5)
    first = draws()
    seed_streams(1, 0, 5)
    assert draws() == first
    for others in ((1, 0, 6), (1, 1, 5), (2, 0, 5)):
        seed_streams(*others)
        assert not set(draws()) & set(first)
    states = StreamStates([])
    ahead = draws()
    states.put_back()
    assert draws() == ahead


def snapshots_of(folder: Path, steps: range, keep: int = 2) -> Snapshots:
    snapshots = Snapshots(folder / "snapshots", keep, TENSORS)
    for step in steps:
        snapshots.write(step, {"step": step, "values": [torch.full((100,), float(step)), torch.tensor(step)]})
    snapshots.finish()
    return snapshots


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "snapshots").iterdir())


def test_old_snapshots_are_removed_and_the_newest_is_read(tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path, range(1, 6))
    assert files(tmp_path) == ["step-000000000004.snapshot", "step-000000000005.snapshot"]
    state = snapshots.newest()
    assert state["step"] == 5
    assert state["values"][0].tolist() == [5.0] * 100
    assert state["values"][1].item() == 5


def test_there_is_none(tmp_path: Path) -> None:
    assert Snapshots(tmp_path, 1, TENSORS).newest() is None


def test_a_torn_or_damaged_snapshot_is_recognized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = snapshots_of(tmp_path, range(1, 3))
    path = tmp_path / "snapshots" / "step-000000000002.snapshot"
    content = path.read_bytes()
    for size in range(0, len(content), 41):
        path.write_bytes(content[:size])
        assert snapshots.newest()["step"] == 1
    for place in range(0, len(content), 41):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert snapshots.newest()["step"] == 1
    path.write_bytes(content + b"\0")
    assert snapshots.newest()["step"] == 1
    assert str(path) in capsys.readouterr().err
    path.write_bytes(content)
    assert snapshots.newest()["step"] == 2


def test_what_cannot_be_written_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots = snapshots_of(tmp_path, range(1, 2))
    (tmp_path / "snapshots" / f"step-000000000002.{os.getpid()}.partial").mkdir()
    snapshots.write(2, {"step": 2})
    snapshots.finish()
    assert "cannot be written" in capsys.readouterr().err
    assert snapshots.newest()["step"] == 1


def test_snapshots_are_for_their_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        snapshots_of(tmp_path, range(1, 3))
    finally:
        os.umask(before)
    folder = tmp_path / "snapshots"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in ("step-000000000001.12.partial", "step-000000000002.12.partial", "step-000000000003.12.partial"):
        (folder / name).touch()
    snapshots_of(tmp_path, range(1, 3))
    assert files(tmp_path) == [
        "step-000000000001.snapshot",
        "step-000000000002.snapshot",
        "step-000000000003.12.partial",  # its process may be further than this one
    ]


def test_all_processes_are_lost_and_go_on_from_a_snapshot(tmp_path: Path) -> None:
    faults = [Fault(rank, 5, "end") for rank in range(2)]
    supervisor = Supervisor(tmp_path, 2)
    answers = supervisor.run(train, "adamw overlap dropout", STEPS, faults, str(tmp_path / "snapshots"))
    assert {answer["digest"] for answer in answers} == {undisturbed("adamw overlap dropout", 2)}
    # From step 4, or the one before if that was still being written.
    assert len({answer["steps_made"] for answer in answers}) == 1
    assert answers[0]["steps_made"] in (STEPS - 4, STEPS - 2)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["sgd dropout", "adamw overlap"])
def test_restarts_without_recovery_go_on_from_a_snapshot(tmp_path: Path, size: int, kind: str) -> None:
    for steps, made in ((4, 4), (STEPS, STEPS - 4)):
        supervisor = Supervisor(tmp_path, size, POSEIDON_ON_FAILURE="abort")
        answers = supervisor.run(train, kind, steps, [], str(tmp_path / "snapshots"))
        assert {answer["steps_made"] for answer in answers} == {made}
    assert answers[0]["digest"] == undisturbed(kind, size)  # the buffers of other ranks are their own


def test_an_old_snapshot_does_not_count_where_others_have_more(tmp_path: Path) -> None:
    answers = recovered(tmp_path, "sgd dropout", Fault(0, 5, "backward"), snapshots=True)
    assert answers[1]["history"][0]["step"] == 5
    assert answers[0]["steps_made"] == STEPS - 5
