"""The backend `poseidon` of torch.distributed: its collectives against what torch computes, and its errors."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import poseidon.torch  # noqa: F401  # registers the backend
import workers
from page_programs import output_on_two, programs

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

TEAM = workers.Team(3)
_names = itertools.count()

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = ((), (1,), (7,), (3, 5), (40_000,))


def inside(rank: int, function: Callable[..., Any], folder: str, size: int, backend: str, args: tuple[Any, ...]) -> Any:
    """Runs `function(rank, size, *args)` in a process group of this backend."""
    dist.init_process_group(backend, init_method=f"file://{folder}", rank=rank, world_size=size)
    try:
        answer = function(rank, size, *args)
        dist.barrier()
        return "done" if answer is None else answer
    finally:
        dist.destroy_process_group()


def run(size: int, folder: Path, function: Callable[..., Any], *args: Any, backend: str = "poseidon") -> list[Any]:
    """Each rank's answer. AssertionError if one failed."""
    meeting = str(folder / f"meeting-{next(_names)}")
    answers: list[Any] = TEAM.ask(size, 60.0 * workers.SLOWED, inside, function, meeting, size, backend, args)
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, workers.Failure), f"rank {rank}: {answer.trace}"
    return answers


def values(dtype: torch.dtype, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """What a rank contributes: small whole numbers, whose sums and products are exact in every type."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3) % 4
    if dtype == torch.bool:
        return (numbers > 1).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers - 1).double()).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(op: str, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> torch.Tensor:
    return functools.reduce(OPS[op], [values(dtype, shape, rank) for rank in range(size)])


def reduce_all(rank: int, size: int) -> None:
    for dtype, shape in itertools.product((*FLOATS, *WHOLE), SIZES):
        for op in OPS:
            if dtype.is_floating_point and op.startswith("B"):
                continue
            tensor = values(dtype, shape, rank)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            assert torch.equal(tensor, reduced(op, dtype, shape, size)), (dtype, shape, op)
    for shape in SIZES:
        tensor = values(torch.complex64, shape, rank)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, reduced("SUM", torch.complex64, shape, size))
        tensor = values(torch.float32, shape, rank)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert torch.allclose(tensor, reduced("SUM", torch.float32, shape, size) / size)
    truth = values(torch.bool, (9,), rank)
    dist.all_reduce(truth, op=dist.ReduceOp.SUM)
    assert torch.equal(truth, functools.reduce(torch.logical_or, [values(torch.bool, (9,), r) for r in range(size)]))


def move_all(rank: int, size: int) -> None:
    for dtype, shape in itertools.product((*FLOATS, *WHOLE, torch.bool, torch.complex64), SIZES):
        own = values(dtype, shape, rank)
        expected = [values(dtype, shape, r) for r in range(size)]
        places = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(places, own)
        assert all(torch.equal(a, b) for a, b in zip(places, expected, strict=True)), (dtype, shape)
        for root in range(size):
            tensor = own.clone() if rank == root else torch.zeros_like(own)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, expected[root])
        places = [torch.empty_like(own) for _ in range(size)]
        dist.gather(own, places if rank == size - 1 else None, dst=size - 1)
        assert rank != size - 1 or all(torch.equal(a, b) for a, b in zip(places, expected, strict=True))
        tensor = torch.empty_like(own)
        dist.scatter(tensor, expected if rank == 0 else None, src=0)
        assert torch.equal(tensor, own)
        result = torch.empty(size, *shape, dtype=dtype)
        dist.all_gather_into_tensor(result.reshape(-1), own.reshape(-1))
        assert torch.equal(result, torch.stack(expected))
        places = [torch.empty_like(own) for _ in range(size)]
        dist.all_to_all(places, [own] * size)
        assert all(torch.equal(a, b) for a, b in zip(places, expected, strict=True))


def reduce_parts(rank: int, size: int) -> None:
    for dtype, shape in itertools.product((torch.float32, torch.int64), SIZES):
        parts = [values(dtype, shape, rank + to) for to in range(size)]
        expected = functools.reduce(torch.add, [values(dtype, shape, r + rank) for r in range(size)])
        output = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(output, parts)
        assert torch.equal(output, expected)
        output = torch.empty(shape, dtype=dtype).reshape(-1)
        dist.reduce_scatter_tensor(output, torch.stack(parts).reshape(-1))
        assert torch.equal(output, expected.reshape(-1))
        for root in range(size):
            tensor = values(dtype, shape, rank)
            dist.reduce(tensor, root)
            assert torch.equal(
                tensor, reduced("SUM", dtype, shape, size) if rank == root else values(dtype, shape, rank)
            )


def split_unevenly(rank: int, size: int) -> None:
    # Rank r sends r + t rows to rank t.
    sent = torch.cat([torch.full((rank + to, 3), 10.0 * rank + to) for to in range(size)])
    received = torch.empty(sum(source + rank for source in range(size)), 3)
    dist.all_to_all_single(received, sent, [source + rank for source in range(size)], [rank + to for to in range(size)])
    assert torch.equal(received, torch.cat([torch.full((s + rank, 3), 10.0 * s + rank) for s in range(size)]))


def lie_anyhow(rank: int, size: int) -> None:
    """Tensors whose elements do not lie one after the other are written where they lie."""
    base = torch.zeros(8, 10)
    view = base[1:7:2, ::3]
    view.copy_(values(torch.float32, tuple(view.shape), rank))
    before = base.clone()
    dist.all_reduce(view)
    assert torch.equal(view, reduced("SUM", torch.float32, tuple(view.shape), size))
    before[1:7:2, ::3] = view
    assert torch.equal(base, before), "something beside the tensor was written"
    image = values(torch.float32, (2, 3, 4, 5), rank).to(memory_format=torch.channels_last)
    dist.broadcast(image, 0)
    assert torch.equal(image, values(torch.float32, (2, 3, 4, 5), 0))
    places = [torch.zeros(6, 4).t() for _ in range(size)]
    dist.all_gather(places, values(torch.float32, (4, 6), rank))
    assert all(torch.equal(place, values(torch.float32, (4, 6), r)) for r, place in enumerate(places))
    parameter = torch.nn.Parameter(values(torch.float32, (5,), rank))
    dist.all_reduce(parameter.data)
    assert torch.equal(parameter.detach(), reduced("SUM", torch.float32, (5,), size))


def go_on_meanwhile(rank: int, size: int) -> None:
    tensors = [values(torch.float32, (1000 * i + 1,), rank) for i in range(20)]
    pending = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future().then(lambda future: future.value()[0] * 2) for work in pending[::2]]
    for work in reversed(pending):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, reduced("SUM", torch.float32, (1000 * i + 1,), size))
    for future, tensor in zip(futures, tensors[::2], strict=True):
        assert torch.equal(future.wait(), tensor * 2)


def speak(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (0, 3, 100_000):
        places = [torch.empty(count), torch.empty(count)]
        operations = [
            dist.P2POp(dist.isend, torch.full((count,), float(rank)), after, tag=1),
            dist.P2POp(dist.isend, torch.full((count,), 100.0 + rank), after, tag=2),
            dist.P2POp(dist.irecv, places[1], before, tag=2),
            dist.P2POp(dist.irecv, places[0], before, tag=1),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(places[0], torch.full((count,), float(before)))
        assert torch.equal(places[1], torch.full((count,), 100.0 + before))
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            place = torch.empty(2)
            source = dist.recv(place)
            assert torch.equal(place, torch.full((2,), float(source)))
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)


def in_parts(rank: int, size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    for _ in range(3):
        for members, group in zip(([0, 1], [1, 2], [2, 0]), groups, strict=True):
            if rank in members:
                tensor = values(torch.float32, (100,), rank)
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, sum(values(torch.float32, (100,), member) for member in members))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]


def coalesce(rank: int, size: int) -> None:
    tensors = [values(torch.float32, (i + 1,), rank) for i in range(5)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(torch.equal(t, reduced("SUM", torch.float32, (i + 1,), size)) for i, t in enumerate(tensors))


def end_without_a_wait(rank: int, size: int) -> None:
    """Whoever polls finds results where they belong, also where the tensor's memory is not one piece."""
    base = torch.zeros(6, 4)
    base[:, 1] = rank + 1.0
    work = dist.all_reduce(base[:, 1], async_op=True)
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert torch.equal(base[:, 1], torch.full((6,), size * (size + 1) / 2))
    whole = torch.full((3,), 2 * rank + 1)
    work = dist.all_reduce(whole, op=dist.ReduceOp.AVG, async_op=True)
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert whole.tolist() == [size] * 3


def wait_inside_of_a_callback(rank: int, size: int) -> None:
    """What runs when a future completes may wait for another one, as torch's hooks of DDP do."""

    def again(future: torch.futures.Future[Any]) -> torch.Tensor:
        inner = dist.all_reduce(future.value()[0].clone(), async_op=True).get_future()
        result: torch.Tensor = inner.wait()[0]
        return result

    for _ in range(3):  # one after the other: the ranks' calls have to come in one order
        future = dist.all_reduce(torch.ones(100), async_op=True).get_future().then(again)
        assert torch.equal(future.wait(), torch.full((100,), float(size * size)))
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, 2, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(3, 40)).sum().backward()


CASES = [reduce_all, move_all, reduce_parts, split_unevenly, lie_anyhow, go_on_meanwhile, speak, coalesce]
CASES += [end_without_a_wait, wait_inside_of_a_callback]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives_give_what_torch_computes(size: int, case: Callable[..., None], tmp_path: Path) -> None:
    run(size, tmp_path, case)


@pytest.mark.parametrize("case", [reduce_all, move_all, reduce_parts, go_on_meanwhile], ids=lambda case: case.__name__)
def test_one_rank_is_enough(case: Callable[..., None], tmp_path: Path) -> None:
    run(1, tmp_path, case)


def test_groups_of_parts_of_the_ranks_share_a_client(tmp_path: Path) -> None:
    run(3, tmp_path, in_parts)


def beside_gloo(rank: int, size: int) -> None:
    group = dist.new_group([0, 2], backend="poseidon")
    if rank != 1:
        tensor = values(torch.float32, (10,), rank)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, values(torch.float32, (10,), 0) + values(torch.float32, (10,), 2))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def test_a_group_may_be_poseidons_where_others_are_not(tmp_path: Path) -> None:
    run(3, tmp_path, beside_gloo, backend="gloo")


def sum_in_order(rank: int, size: int, count: int) -> list[int]:
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r * 3 - 3) for r in range(size)]
    own = parts[rank].clone()
    dist.all_reduce(own)
    assert torch.equal(own, functools.reduce(torch.add, parts)), "the sum is not that in rank order"
    return own.view(torch.int32).tolist()


@pytest.mark.parametrize("count", [100, 50_000])
def test_sums_are_in_rank_order_with_the_same_bits_everywhere(count: int, tmp_path: Path) -> None:
    first = run(3, tmp_path, sum_in_order, count)
    assert first[0] == first[1] == first[2]
    assert run(3, tmp_path, sum_in_order, count) == first


def differ(rank: int, size: int, how: str) -> str:
    tensor = torch.ones(100)
    try:
        if how == "shape":
            dist.all_reduce(torch.ones(100 + rank))
        elif how == "dtype":
            dist.all_reduce(torch.ones(100, dtype=torch.float64 if rank == 1 else torch.int64))
        elif how == "order":
            dist.broadcast(tensor, 0) if rank == 1 else dist.all_reduce(tensor)
        elif how == "other dtype of one size":
            dist.broadcast(torch.ones(100, dtype=torch.int32 if rank else torch.float32), 0)
        elif how == "message":
            one = torch.ones(100, dtype=torch.int32 if rank else torch.float32)
            dist.recv(one, 0) if rank else dist.send(one, 1)
        elif how == "large":
            dist.all_reduce(torch.ones(1_000_000 + rank))
        dist.barrier()  # whoever had all that it needed before learns of it here
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def differ_alone(rank: int, folder: str, size: int, how: str) -> str:
    dist.init_process_group("poseidon", init_method=f"file://{folder}", rank=rank, world_size=size)
    try:
        return differ(rank, size, how)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["shape", "dtype", "order", "large", "other dtype of one size", "message"])
def test_calls_that_differ_are_named_with_their_places(how: str, tmp_path: Path) -> None:
    texts = TEAM.ask(2, 40.0 * workers.SLOWED, differ_alone, str(tmp_path / "meeting"), 2, how)
    for text in texts:
        assert isinstance(text, str), text
        assert text.startswith("Mismatch: "), text
        for rank in range(2):
            assert f"rank {rank}: " in text.partition("under way were: ")[2], text
        assert "test_torch_backend.py:" in text


def time_out(rank: int, size: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    text = ""
    if rank == 0:
        try:
            dist.barrier(group)
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
        dist.barrier()
    else:
        dist.barrier()
        dist.barrier(group)
    return text


def test_a_call_that_nobody_else_makes_ends_with_its_groups_timeout(tmp_path: Path) -> None:
    text = run(2, tmp_path, time_out)[0]
    assert text.startswith("PoseidonTimeout: barrier")
    assert "timeout of 1.0 s" in text
    assert "test_torch_backend.py:" in text


def test_the_pages_program_prints_what_it_says(tmp_path: Path) -> None:
    (program,) = programs("torch-backend.md")
    (tmp_path / "script.py").write_text(program)
    assert output_on_two(tmp_path / "script.py").count("[1.0, 3.0, 5.0, 7.0]") == 2


def refuse_mixed(rank: int, folder: str) -> str:
    try:
        dist.init_process_group("cpu:poseidon,cuda:gloo", init_method=f"file://{folder}", rank=rank, world_size=1)
    except ValueError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "nothing was raised"


def test_one_of_several_backends_is_refused_with_what_to_write(tmp_path: Path) -> None:
    # In a process of its own: torch has counted the group that it could not make.
    (text,) = workers.run_fresh(1, refuse_mixed, 0, str(tmp_path / "meeting"))
    assert "backend_override" in str(text)


def refused(rank: int, size: int) -> list[str]:
    texts = []
    for call in (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.PRODUCT),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.float8_e4m3fn)),
        lambda: dist.all_gather_into_tensor(torch.empty(5), torch.empty(2)),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.empty(5)),
        lambda: dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 3], [1, 1]),
    ):
        try:
            call()
            texts.append("nothing was raised")
        except (ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_what_cannot_be_is_refused_and_the_group_goes_on(tmp_path: Path) -> None:
    for texts in run(2, tmp_path, refused):
        # Of complex numbers torch itself says so.
        assert all(text.startswith(("InvalidArgument: ", "ValueError: ")) for text in texts), texts
