"""Collectives for values that a training script computes beside gradients: metrics, predictions, decisions of a rank.

Every rank makes the same calls in the same order, from the thread that trains. Each call blocks up to the job's
`timeout`. Gradients may be in flight meanwhile. Values are added in rank order, and every rank gets the same bits. No
gradient flows through. Calls that differ between the ranks raise Mismatch on all of them, and change nothing.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from numbers import Complex, Integral, Real
from typing import Any

import numpy as np
import torch

from poseidon.adapter.agreement import first_difference
from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.process.context import collective_control, deferring, world_size
from poseidon.torch.process.context import rank as own_rank
from poseidon.torch.tensors.memory import host_bytes

Value = torch.Tensor | bool | int | float | complex

# What elements are reduced as.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.int64),
    **dict.fromkeys((torch.uint16, torch.uint32), torch.int64),
}
_ADDED = ("sum", "mean")
_COMPARED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
_OPERATIONS = (*_ADDED, *_COMPARED)
_PIECE_ELEMENTS = 1 << 20  # gathered from each rank at a time
_NUMBER = struct.Struct("<Bqdd")  # kind, whole number, real part, imaginary part


@deferring(lambda rows, seconds: rows)
def balance_rows(rows: int, seconds: float) -> int:
    """How many rows this rank should take, so that all ranks end their steps together. Collective.

    This rank's last step computed `rows` rows in `seconds`, without waiting for others. The number of all ranks' rows
    stays the same. See `DistributedDataParallel.set_weight`. Raises InvalidArgument for 0 rows or seconds.
    """
    control = collective_control("balance_rows")
    if control is None:
        return rows
    told = control.one_hot([rows, round(seconds * 1e9)])
    return balanced_rows([count for count, _ in told], [time_ns / 1e9 for _, time_ns in told])[own_rank()]


@deferring(lambda value, op="sum": value)
def all_reduce(value: Value, op: str = "sum") -> Any:
    """The sum, mean, min, max or product of all ranks' `value`, on every rank.

    A tensor is overwritten and returned. It has one shape and dtype on all ranks, and any device and memory format.
    16-bit numbers are added in 32 bits and rounded once. Whole numbers wrap around as in torch. The sum of booleans is
    whether any is true. For a Python number the result is a number. Numbers are added exactly as Python does, and may
    be int on one rank and float on another. Raises InvalidArgument if there is no such result, such as the mean of a
    tensor of whole numbers.
    """
    return _overwritten(value, _reduce("all_reduce", value, op, ""))


@deferring(lambda value, root=0, op="sum": value if own_rank() == root else None)
def reduce(value: Value, root: int = 0, op: str = "sum") -> Any:
    """The same as `all_reduce`, but only for rank `root`. The others' tensors stay as they are, and they get None."""
    _check_root(root)
    result = _reduce("reduce", value, op, f" to rank {root}")
    return _overwritten(value, result) if own_rank() == root else None


@deferring(lambda value: [value] * world_size())
def all_gather(value: Value) -> list[Any]:
    """A list of every rank's `value`, by rank: new tensors of this value's shape, dtype and device, or Python numbers.

    A tensor has one shape and dtype on all ranks. Any dtype and memory format is allowed.
    """
    if not isinstance(value, torch.Tensor):
        return _gather_numbers("all_gather", value)
    _check_tensor("all_gather", value)
    control = collective_control("all_gather")
    _check_same(control, f"all_gather of {_kind(value)}")
    if control is None or value.numel() == 0:
        return [value.detach().clone() for _ in range(world_size())]
    rows = torch.from_numpy(control.gather(host_bytes(value)))
    # Each with memory of its own, not a part of what all share.
    return [row.view(value.dtype).view(value.shape).to(value.device, copy=True) for row in rows]


@deferring(lambda tensors, root=0: None)
def broadcast(tensors: torch.Tensor | Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrites `tensors` on every rank with those of rank `root`.

    Every rank passes tensors of the same number, shapes and dtypes, in the same order. Any dtype, device and memory
    format is allowed. Raises InvalidArgument if `root` is no rank.
    """
    _check_root(root)
    every = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in every:
        _check_dense("broadcast", tensor)
    control = collective_control("broadcast")
    head = f"broadcast from rank {root} of {len(every)} tensors"
    _check_same(control, "\n".join([head, *(f"broadcast of {_kind(tensor)}" for tensor in every)]))
    if control is not None:
        control.broadcast(every, root)


def _check_root(root: int) -> None:
    size = world_size()
    if not 0 <= root < size:
        raise InvalidArgument(f"root is {root}: it must be a rank, from 0 to {size - 1}")


def _check_dense(caller: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{caller} got a {type(tensor).__name__}: pass a tensor, as torch.tensor(value)")
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{caller} got a tensor of layout {tensor.layout}: pass tensor.to_dense()")


def _check_tensor(caller: str, tensor: torch.Tensor) -> None:
    _check_dense(caller, tensor)
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{caller} got a tensor that gradients would flow through, which they do not beyond this rank: pass "
            "tensor.detach()"
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, dtype {str(tensor.dtype).removeprefix('torch.')}"


def _check_same(control: Control | None, call: str) -> None:
    """Raises Mismatch on every rank unless all make this call."""
    difference = None if control is None else first_difference(control, call)
    if difference is not None:
        rank, theirs, ours = difference
        raise Mismatch(
            f"the ranks called different collectives: rank 0 {ours!r}, rank {rank} {theirs!r}; make the same calls in "
            "the same order on every rank, with tensors of one shape and dtype"
        )


def _overwritten(value: Value, result: Any) -> Any:
    """The tensor with this result in it, or the number that is the result."""
    if not isinstance(value, torch.Tensor):
        return result
    with torch.no_grad():
        return value.copy_(result)


def _reduce(caller: str, value: Any, op: str, where: str) -> Any:
    if op not in _OPERATIONS:
        raise InvalidArgument(f"op is {op!r}: {caller} knows {', '.join(map(repr, _OPERATIONS))}")
    if not isinstance(value, torch.Tensor):
        return _combine_numbers(caller, _gather_numbers(f"{caller} {op}{where}", value), op)
    _check_tensor(caller, value)
    _check_reducible(caller, value.dtype, op)
    control = collective_control(caller)
    _check_same(control, f"{caller} {op}{where} of {_kind(value)}")
    if control is None or value.numel() == 0:
        return value.detach()
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    wide = flat.to(_WIDE[flat.dtype], copy=True)
    if op in _ADDED:
        control.add(wide.numpy(), world_size() if op == "mean" else 1)
    else:
        _compare(control, wide, _COMPARED[op])
    # view() takes pairs of reals back to complex numbers.
    return wide.to(flat.dtype).view(value.dtype).view(value.shape)


def _check_reducible(caller: str, dtype: torch.dtype, op: str) -> None:
    if dtype.to_real() not in _WIDE:
        raise InvalidArgument(f"{caller} cannot reduce {dtype}: pass tensor.float()")
    if dtype.is_complex and op in _COMPARED:
        raise InvalidArgument(f"{caller} has no {op} of complex numbers: pass a real tensor, such as tensor.abs()")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise InvalidArgument(f"{caller} has no mean in a tensor of {dtype}: pass tensor.float()")


def _compare(
    control: Control, values: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replaces the elements of a 1-D CPU tensor by what `combine` makes of all ranks', in rank order."""
    for piece in values.split(_PIECE_ELEMENTS):
        rows = torch.from_numpy(control.gather(host_bytes(piece))).view(values.dtype)
        piece.copy_(functools.reduce(combine, rows))


def _gather_numbers(call: str, value: Any) -> list[Any]:
    row = _packed(call.split()[0], value)
    control = collective_control(call.split()[0])
    _check_same(control, f"{call} of a number")
    if control is None:
        return [_unpacked(row)]
    return [_unpacked(gathered.tobytes()) for gathered in control.gather(np.frombuffer(row, np.uint8))]


def _packed(caller: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return _NUMBER.pack(0, value, 0.0, 0.0)
    if isinstance(value, Integral):
        if not -(1 << 63) <= int(value) < 1 << 63:
            raise InvalidArgument(f"{caller} got {value}, a whole number of more than 64 bits: pass float(value)")
        return _NUMBER.pack(1, int(value), 0.0, 0.0)
    if isinstance(value, Real):
        return _NUMBER.pack(2, 0, float(value), 0.0)
    if isinstance(value, Complex):
        return _NUMBER.pack(3, 0, complex(value).real, complex(value).imag)
    raise InvalidArgument(
        f"{caller} got a {type(value).__name__}: pass a tensor, such as torch.tensor(value), or a number"
    )


def _unpacked(row: bytes) -> Any:
    kind, whole, real, imaginary = _NUMBER.unpack(row)
    return (bool(whole), whole, real, complex(real, imaginary))[kind]


def _combine_numbers(caller: str, values: Sequence[Any], op: str) -> Any:
    if op in ("min", "max"):
        if any(isinstance(value, complex) for value in values):
            raise InvalidArgument(f"{caller} has no {op} of complex numbers: pass abs(value)")
        unordered = next((value for value in values if value != value), None)
        return unordered if unordered is not None else (min if op == "min" else max)(values)
    # Not sum(), which rounds differently from one version of Python to another; + makes numbers of truth values.
    result = functools.reduce(lambda a, b: a * b if op == "product" else a + b, [+value for value in values])
    return result / len(values) if op == "mean" else result


def balanced_rows(rows: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Returns as many rows in all, shared out by the ranks' speeds.

    Rank r took `seconds[r]` for the computation of `rows[r]` rows. If each row takes as long as before, all ranks then
    take equally long, but for the rounding to whole rows. Raises InvalidArgument for a rank without rows or time, whose
    speed is not known.
    """
    for rank, (count, time) in enumerate(zip(rows, seconds, strict=True)):
        if count < 1 or not time > 0:
            raise InvalidArgument(
                f"rank {rank} took {time} s for {count} rows, so its speed is not known: give it rows"
            )
    speeds = [count / time for count, time in zip(rows, seconds, strict=True)]
    shares = [sum(rows) * speed / sum(speeds) for speed in speeds]
    balanced = [max(1, int(share)) for share in shares]
    by_rest = sorted(range(len(rows)), key=lambda rank: (int(shares[rank]) - shares[rank], rank))
    for rank in by_rest[: sum(rows) - sum(balanced)]:  # the largest remainders
        balanced[rank] += 1
    while sum(balanced) > sum(rows):  # ranks that would have got no row have one
        balanced[balanced.index(max(balanced))] -= 1
    return balanced
