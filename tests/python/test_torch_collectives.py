"""all_reduce, reduce, all_gather and broadcast: values of every kind, equal bits, and loud where ranks differ."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poseidon.torch as api
import workers
from poseidon.torch.process.context import context
from torch_cases import all_equal, digest, mean_loss, mlp, mlp_batch, own_rows

WORLD_SIZE = 3
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "mean": operator.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": operator.mul,
}


def value_of(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def expected(op: str, dtype: torch.dtype, shape: tuple[int, ...] = (3, 5)) -> torch.Tensor:
    """In the arithmetic that is promised: 16 bits in 32, whole numbers in 64, in rank order."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        wide = torch.int64
    values = [value_of(rank, dtype, shape).to(wide) for rank in range(WORLD_SIZE)]
    result = functools.reduce(COMBINE[op], values)
    return (result / WORLD_SIZE if op == "mean" else result).to(dtype)


def reduce_every_kind() -> str:
    results = []
    for dtype in [*FLOATS, *COMPLEX, *WHOLE]:
        for op in COMBINE:
            if (dtype.is_complex and op not in ("sum", "mean")) or (op == "mean" and dtype in WHOLE):
                continue
            tensor = value_of(api.rank(), dtype)
            assert api.all_reduce(tensor, op) is tensor
            torch.testing.assert_close(tensor, expected(op, dtype), msg=lambda text, k=(dtype, op): f"{k}: {text}")
            results.append(tensor)
    return digest(results)


def test_all_reduce_of_every_dtype_and_operation() -> None:
    assert all_equal(workers.run(WORLD_SIZE, reduce_every_kind))


def views() -> None:
    rank = api.rank()
    table = torch.zeros(5, 6)
    every_second = table.t()[::2]
    every_second.copy_(value_of(rank, torch.float32))
    api.all_reduce(every_second)
    torch.testing.assert_close(table.t()[::2], expected("sum", torch.float32))
    assert not table.t()[1::2].any()
    strided = torch.zeros(8)[::2]
    strided.fill_(rank)
    assert [part.tolist() for part in api.all_gather(strided)] == [[float(r)] * 4 for r in range(WORLD_SIZE)]
    assert api.all_reduce(strided, "max").tolist() == [2.0] * 4
    conjugate = value_of(rank, torch.complex64).conj()
    assert conjugate.is_conj()
    torch.testing.assert_close(api.all_reduce(conjugate), expected("sum", torch.complex64).conj().resolve_conj())
    negative = torch.imag(value_of(rank, torch.complex64).conj())
    assert negative.is_neg()
    theirs = [-value_of(other, torch.complex64).imag for other in range(WORLD_SIZE)]
    assert all(map(torch.equal, api.all_gather(negative), theirs))
    torch.testing.assert_close(api.all_reduce(negative, "max"), torch.stack(theirs).max(0).values)
    scalar, empty = torch.tensor(float(rank)), torch.empty(0, 4)
    assert api.all_reduce(scalar, "mean").item() == 1
    assert api.all_reduce(empty, "min").shape == (0, 4)
    assert [part.shape for part in api.all_gather(empty)] == [(0, 4)] * WORLD_SIZE
    param = nn.Parameter(torch.full((2,), float(rank)))
    api.all_reduce(param)
    assert param.tolist() == [3, 3]
    assert param.requires_grad


def test_views_scalars_empty_tensors_and_parameters() -> None:
    workers.run(WORLD_SIZE, views)


def large(op: str) -> str:
    tensor = value_of(api.rank(), torch.float32, (2_300_001,))
    api.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, expected(op, torch.float32, (2_300_001,)))
    return digest([tensor])


@pytest.mark.parametrize("op", ["mean", "max"])
def test_tensors_of_several_blocks(op: str) -> None:
    assert all_equal(workers.run(WORLD_SIZE, large, op))


def sixteen_bit_sum() -> float:
    return api.all_reduce(torch.tensor([2048.0 if api.rank() == 0 else 1.0], dtype=torch.float16)).item()


def test_sixteen_bit_numbers_are_rounded_once() -> None:
    assert workers.run(WORLD_SIZE, sixteen_bit_sum) == [2050.0] * WORLD_SIZE  # in 16 bits 2048 + 1 + 1 is 2048


def gather_every_kind() -> None:
    for shape in ((3, 5), (200, 300)):  # in one exchange, and in one for each rank
        for dtype in [*FLOATS, *COMPLEX, *WHOLE, torch.float8_e4m3fn, torch.uint64]:
            mine = value_of(api.rank(), torch.float32, shape).to(dtype) if dtype.itemsize == 1 else None
            mine = value_of(api.rank(), dtype, shape) if mine is None else mine
            gathered = api.all_gather(mine.t())
            for rank, part in enumerate(gathered):
                theirs = value_of(rank, torch.float32, shape).to(dtype) if dtype.itemsize == 1 else None
                theirs = value_of(rank, dtype, shape) if theirs is None else theirs
                assert part.shape == shape[::-1]
                assert part.dtype == dtype
                assert digest([part]) == digest([theirs.t()])
            gathered[0].copy_(gathered[1])
            assert digest([gathered[2]]) == digest([api.all_gather(mine.t())[2]])


def test_all_gather_of_every_dtype() -> None:
    workers.run(WORLD_SIZE, gather_every_kind)


def numbers() -> list[Any]:
    rank = api.rank()
    return [
        api.all_reduce(0.5 * rank, "mean"),
        api.all_reduce(rank, "mean"),
        api.all_reduce(2**62),  # more than 64 bits in the end
        api.all_reduce(rank if rank else 0.25),  # whole on some ranks
        api.all_reduce(rank > 0),
        api.all_reduce(rank > 0, "max"),
        api.all_reduce(1 + rank * 1j, "product"),
        api.all_reduce(rank + 1, "product"),
        api.all_reduce(np.float32(rank), "min"),
        api.all_reduce(np.int64(rank), "max"),
        api.all_gather(rank * 1.5),
        api.all_gather(-rank),
        api.reduce(rank, 1),
        math.isnan(api.all_reduce(math.nan if rank == 2 else 1.0, "min")),
    ]


@pytest.mark.parametrize("options", [{}, {"stragglers": "drop"}, {"server_cores": 0}], ids=str)
def test_numbers(options: dict[str, Any]) -> None:
    answers = workers.run(WORLD_SIZE, numbers, **options)
    product = 1 * (1 + 1j) * (1 + 2j)
    for rank, answer in enumerate(answers):
        reduced = 3 if rank == 1 else None
        assert answer == [
            0.5, 1.0, 3 * 2**62, 3.25, 2, True, product, 6, 0.0, 2, [0.0, 1.5, 3.0], [0, -1, -2], reduced, True,
        ]  # fmt: skip
        assert [type(value) for value in answer[:6]] == [float, float, int, float, int, bool]


def reduce_to_one() -> tuple[list[float], bool]:
    tensor = torch.full((2,), float(api.rank()))
    result = api.reduce(tensor, root=2, op="max")
    return tensor.tolist(), result is tensor


def test_reduce_reaches_the_root_alone() -> None:
    assert workers.run(WORLD_SIZE, reduce_to_one) == [([0.0, 0.0], False), ([1.0, 1.0], False), ([2.0, 2.0], True)]


DIFFERENT: list[tuple[Callable[[int], Any], str]] = [
    (lambda rank: api.all_reduce(torch.zeros(2 + (rank == 1))), "shape (3,)"),
    (lambda rank: api.all_reduce(torch.zeros(2, 3).reshape(3, 2) if rank == 1 else torch.zeros(2, 3)), "shape (3, 2)"),
    (lambda rank: api.all_reduce(torch.zeros(2, dtype=torch.int32 if rank == 1 else torch.float32)), "int32"),
    (lambda rank: api.all_reduce(torch.zeros(2), "max" if rank == 1 else "sum"), "all_reduce max"),
    (lambda rank: api.all_reduce(torch.zeros(()) if rank == 1 else 0.0), "shape ()"),
    (lambda rank: (api.reduce if rank == 1 else api.all_reduce)(torch.zeros(2)), "reduce sum to rank 0"),
    (lambda rank: api.reduce(0.5, root=int(rank == 1)), "to rank 1"),
    (lambda rank: api.all_gather(torch.zeros(2 + (rank == 1))), "shape (3,)"),
    (lambda rank: api.broadcast(torch.zeros(2, dtype=torch.int32 if rank == 1 else torch.float32)), "int32"),
    (lambda rank: api.broadcast([torch.zeros(2)] * (1 + (rank == 1))), "2 tensors"),
    (lambda rank: api.broadcast(torch.zeros(2), root=int(rank == 1)), "from rank 1"),
    (lambda rank: api.all_gather(1) if rank == 1 else api.broadcast(torch.zeros(2)), "all_gather of a number"),
]


def differ(number: int) -> tuple[str, str, float]:
    try:
        DIFFERENT[number][0](api.rank())
    except api.PoseidonError as error:
        return error.code, str(error), api.all_reduce(0.5)  # the ranks still agree: the job goes on
    return "", "nothing was raised", 0.0


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_ranks_that_call_differently_are_told(number: int) -> None:
    for code, text, after in workers.run(WORLD_SIZE, differ, number):
        assert code == "mismatch", text
        assert "rank 1" in text
        assert DIFFERENT[number][1] in text
        assert after == 1.5


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: api.all_reduce(torch.zeros(2), "avg"), "op is 'avg': all_reduce knows 'sum', 'mean'"),
    (lambda: api.all_reduce(torch.zeros(2, dtype=torch.int32), "mean"), "no mean in a tensor of torch.int32: pass"),
    (lambda: api.all_reduce(torch.zeros(2, dtype=torch.bool), "mean"), "no mean in a tensor of torch.bool: pass"),
    (lambda: api.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"), "no max of complex numbers: pass"),
    (lambda: api.all_reduce(1j, "min"), "no min of complex numbers: pass abs"),
    (lambda: api.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn)), "cannot reduce torch.float8_e4m3fn: pass"),
    (lambda: api.all_reduce(2**63), "more than 64 bits: pass float"),
    (lambda: api.all_reduce([0.5]), "all_reduce got a list: pass a tensor"),
    (lambda: api.all_gather(np.zeros(2)), "all_gather got a ndarray: pass a tensor"),
    (lambda: api.all_gather(2 * torch.zeros(2, requires_grad=True)), "all_gather got a tensor that gradients.*detach"),
    (lambda: api.all_reduce(2 * torch.zeros(2, requires_grad=True)), "all_reduce got a tensor that gradients.*detach"),
    (lambda: api.all_reduce(torch.zeros(2, 2).to_sparse()), "layout torch.sparse_coo: pass tensor.to_dense"),
    (lambda: api.broadcast(torch.zeros(2, 2).to_sparse()), "layout torch.sparse_coo: pass tensor.to_dense"),
    (lambda: api.broadcast([1.0]), "broadcast got a float: pass a tensor"),
    (lambda: api.reduce(0.5, root=9), "root is 9: it must be a rank"),
]


def refuse_all() -> None:
    for call, text in REFUSED:
        with pytest.raises(api.PoseidonError, match=text):
            call()
    api.barrier()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused(world_size: int) -> None:
    workers.run(world_size, refuse_all)


def alone() -> None:
    tensor = torch.arange(4.0)
    assert api.all_reduce(tensor, "mean") is tensor
    assert tensor.tolist() == [0, 1, 2, 3]
    (copy,) = api.all_gather(tensor)
    copy.zero_()
    assert tensor.tolist() == [0, 1, 2, 3]
    assert api.all_reduce(3, "mean") == 3.0
    assert api.all_gather(True) == [True]
    assert api.reduce(2) == 2
    assert context().client is None


def test_one_worker_exchanges_nothing() -> None:
    workers.run(1, alone)


def varying_sizes() -> int:
    control = context().control
    assert control is not None
    for count in range(1, 400):
        for dtype in (torch.float32, torch.int64, torch.uint8):
            total = api.all_reduce(torch.full((7 * count,), 2, dtype=dtype))
            assert bool((total == 2 * WORLD_SIZE).all())
        api.all_reduce(torch.ones(7 * count), "max")
        api.all_gather(torch.ones(7 * count))
    return len(control._layers)


def test_sizes_that_vary_share_few_layers() -> None:
    assert max(workers.run(WORLD_SIZE, varying_sizes)) < 60


def while_gradients_are_in_flight() -> list[float]:
    model = api.DistributedDataParallel(mlp())
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    means = []
    for step in range(4):
        optimizer.zero_grad()
        loss = mean_loss(model, *map(own_rows, mlp_batch(step, 6)))
        loss.backward()
        means.append(api.all_reduce(loss.item(), "mean"))
        optimizer.step()
        means.append(api.all_reduce(loss.detach(), "mean").item())
        gradient = model.module[0].weight.grad
        assert gradient is not None
        means.append(api.all_reduce(gradient.clone(), "mean").sub(gradient).abs().max().item())
    return means


def test_gradients_may_be_in_flight() -> None:
    answers = workers.run(WORLD_SIZE, while_gradients_are_in_flight)
    assert all_equal(answers)
    assert answers[0][0] == pytest.approx(answers[0][1])
    assert max(answers[0][2::3]) < 1e-7
