"""Random calls of the backend `poseidon`: any collective, type and layout, in any group, waited for in any order."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import poseidon.torch  # noqa: F401  # registers the backend
import workers

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

TEAM = workers.Team(4)
CALLS = 60
_names = itertools.count()
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
SHAPES = ((), (1,), (5,), (4, 6), (3, 2, 8), (300, 200))
Check = Callable[[], None]


def values(dtype: torch.dtype, shape: tuple[int, ...], *seeds: int) -> torch.Tensor:
    """Small whole numbers, which sums keep exact in every type."""
    generator = torch.Generator().manual_seed(hash(seeds) & 0xFFFFFFFF)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in memory of another layout."""
    if how == "strided" and tensor.dim():
        base = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        base[..., ::2] = tensor
        return base[..., ::2]
    if how == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.clone()


class Call:
    """One call, which is the same on all ranks of a group but for the rank's own values and layouts."""

    def __init__(self, draw: random.Random, own: random.Random, number: int, group: Any, members: list[int]) -> None:
        self.number, self.group, self.members = number, group, members
        self.me = members.index(dist.get_rank())
        self.dtype, self.shape = draw.choice(DTYPES), draw.choice(SHAPES)
        self.root = draw.choice(members)
        self.own = own
        self.kind = draw.choice(
            ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
        )
        self.op = draw.choice((dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX))

    def of(self, member: int, part: int = 0) -> torch.Tensor:
        """What the member gives, for the rank of that place."""
        return values(self.dtype, self.shape, self.number, self.members[member], part)

    def mine(self, part: int = 0) -> torch.Tensor:
        return laid_out(self.of(self.me, part), self.own.choice(("plain", "strided", "transposed")))

    def place(self) -> torch.Tensor:
        return laid_out(torch.zeros(self.shape, dtype=self.dtype), self.own.choice(("plain", "strided", "transposed")))

    def reduced(self, part: int = 0) -> torch.Tensor:
        combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}
        return functools.reduce(combine[self.op], [self.of(member, part) for member in range(len(self.members))])

    def start(self, asynchronous: bool) -> tuple[Any, Check]:
        """Makes the call. Returns its work, and what checks the result."""
        everybody, is_root = range(len(self.members)), dist.get_rank() == self.root
        tensor, places = self.mine(), [self.place() for _ in everybody]
        how: dict[str, Any] = {"group": self.group, "async_op": asynchronous}
        expected, results = [self.of(member) for member in everybody], places
        if self.kind == "all_reduce":
            work = dist.all_reduce(tensor, op=self.op, **how)
            expected, results = [self.reduced()], [tensor]
        elif self.kind == "reduce":
            work = dist.reduce(tensor, self.root, op=self.op, **how)
            expected, results = [self.reduced() if is_root else self.of(self.me)], [tensor]
        elif self.kind == "broadcast":
            work = dist.broadcast(tensor, self.root, **how)
            expected, results = [self.of(self.members.index(self.root))], [tensor]
        elif self.kind == "all_gather":
            work = dist.all_gather(places, tensor, **how)
        elif self.kind == "gather":
            work = dist.gather(tensor, places if is_root else None, dst=self.root, **how)
            expected, results = (expected, places) if is_root else ([], [])
        elif self.kind == "scatter":
            parts = [self.mine(part) for part in everybody] if is_root else None
            work = dist.scatter(places[0], parts, src=self.root, **how)
            expected, results = [self.of(self.members.index(self.root), self.me)], places[:1]
        elif self.kind == "reduce_scatter":
            work = dist.reduce_scatter(places[0], [self.mine(part) for part in everybody], op=self.op, **how)
            expected, results = [self.reduced(self.me)], places[:1]
        else:
            work = dist.all_to_all(places, [self.mine(part) for part in everybody], **how)
            expected = [self.of(member, self.me) for member in everybody]

        def check() -> None:
            for result, right in zip(results, expected, strict=True):
                assert torch.equal(result, right), (self.kind, self.op, self.dtype, self.shape, self.members)

        return work, check


def call_at_random(rank: int, size: int, seed: int) -> None:
    draw, own = random.Random(seed), random.Random(seed * 100 + rank)
    sets = [members for count in range(2, size + 1) for members in itertools.combinations(range(size), count)]
    groups = [(dist.new_group(list(members)), list(members)) for members in sets]
    pending: list[tuple[Any, Check]] = []
    for number in range(CALLS):
        group, members = draw.choice(groups)
        if rank not in members:
            continue
        asynchronous = own.random() < 0.7
        # The members draw alike, and whoever is no member draws nothing.
        work, check = Call(random.Random(seed * CALLS + number), own, number, group, members).start(asynchronous)
        if asynchronous:
            pending.append((work, check))
        else:
            check()
        while pending and own.random() < 0.4:
            work, check = pending.pop(own.randrange(len(pending)))
            if own.random() < 0.3:
                work.get_future().wait()
            work.wait()
            check()
    for work, check in pending:
        work.wait()
        check()


def inside(rank: int, folder: str, size: int, seed: int) -> str:
    dist.init_process_group("poseidon", init_method=f"file://{folder}", rank=rank, world_size=size)
    try:
        call_at_random(rank, size, seed)
        dist.barrier()
        return "done"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_give_what_torch_computes(seed: int, tmp_path: Path) -> None:
    size = 2 + seed % 3
    for answer in TEAM.ask(size, 60.0 * workers.SLOWED, inside, str(tmp_path / f"meeting-{next(_names)}"), size, seed):
        assert answer == "done", getattr(answer, "trace", answer)
