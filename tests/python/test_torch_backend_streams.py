"""The order of copies and collectives of tensors on a device, on streams whose clocks are checked."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import poseidon.torch  # noqa: F401  # registers the backend
import workers
from collective_races import collective_races
from poseidon.torch.backend import arrays
from poseidon.torch.tensors import devices

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

TEAM = workers.Team(2)
SHAPES = ((7,), (3, 5), (4000,))
_names = itertools.count()


def call_on_streams(runtime: Any, seed: int) -> None:
    """Starts collectives on one stream, waits for them on others, and uses what they give there."""
    draw = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    streams = [runtime.current_stream(), runtime.Stream(name="a"), runtime.Stream(name="b")]
    for number in range(40):
        shape, start, end = draw.choice(SHAPES), draw.choice(streams), draw.choice(streams)
        with runtime.stream(start):
            mine = torch.full(shape, float(rank + number))
            total = float(sum(other + number for other in range(size)))
            place = torch.zeros(shape)
            kind = draw.choice(["all_reduce", "all_gather", "broadcast", "send", "strided"])
            if kind == "all_reduce":
                works, result, right = [dist.all_reduce(mine, async_op=True)], mine, total
            elif kind == "all_gather":
                places = [torch.zeros(shape) for _ in range(size)]
                works, result, right = [dist.all_gather(places, mine, async_op=True)], places[1], 1.0 + number
            elif kind == "broadcast":
                works, result, right = [dist.broadcast(mine, 1, async_op=True)], mine, 1.0 + number
            elif kind == "send":
                works = [dist.isend(mine, 1 - rank), dist.irecv(place, 1 - rank)]
                result, right = place, 1.0 - rank + number
            else:
                wide = torch.full((*shape, 2), float(rank + number))
                works, result, right = [dist.all_reduce(wide[..., 0], async_op=True)], wide[..., 0], total
        if draw.random() < 0.3:
            works[-1].get_future().wait()
        with runtime.stream(end):
            for work in works:
                work.wait()
            assert torch.equal(result, torch.full_like(result, right)), kind
        if draw.random() < 0.3:
            with runtime.stream(draw.choice(streams)):
                for work in works:
                    work.wait()
                result.clone()


def races_in(rank: int, folder: str, fault: str, seed: int) -> list[str]:
    dist.init_process_group("poseidon", init_method=f"file://{folder}", rank=rank, world_size=2)
    try:
        with FAULTS[fault]():
            races = collective_races(call_on_streams, seed)
        dist.barrier()
        return races
    finally:
        dist.destroy_process_group()


def too_early(tensor: torch.Tensor) -> torch.Tensor:
    host = devices.pinned(tensor)
    host.copy_(tensor, non_blocking=True)
    return host


FAULTS = {
    "none": lambda: mock.patch.object(arrays, "to_host", devices.to_host),
    "starts too early": lambda: mock.patch.object(arrays, "to_host", too_early),
    "not ordered": lambda: mock.patch.object(devices.Submitted, "order", return_value=None),
}


def found(tmp_path: Path, fault: str, seed: int) -> list[str]:
    meeting = str(tmp_path / f"meeting-{next(_names)}")
    answers = TEAM.ask(2, 60.0 * workers.SLOWED, races_in, meeting, fault, seed)
    for answer in answers:
        assert isinstance(answer, list), getattr(answer, "trace", answer)
    return [race for answer in answers for race in answer]


@pytest.mark.parametrize("seed", range(3))
def test_collectives_have_no_races(seed: int, tmp_path: Path) -> None:
    assert found(tmp_path, "none", seed) == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("starts too early", "on the core is not ordered after aten.copy_.default on the"),
        ("not ordered", "is not ordered after aten.copy_.default on the"),
    ],
)
def test_a_missing_wait_is_found(fault: str, told: str, tmp_path: Path) -> None:
    assert any(told in race for race in found(tmp_path, fault, 1))
