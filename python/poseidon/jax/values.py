"""`all_reduce`: the mean, sum, smallest or largest of values over all ranks, in the order of the program.

It takes its turn among the calls that exchange (turns.py), so all ranks make it at the same place of their programs.
A sum is one exchange of all arrays of a type. The smallest and the largest are found in a sum of which each rank fills
its own row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from poseidon.adapter.membership import Membership
from poseidon.adapter.value_layers import value_layer
from poseidon.errors import InvalidArgument
from poseidon.jax.process import context, port
from poseidon.jax.turns import call_plugin, take_turn

Operation = Literal["mean", "sum", "min", "max"]

_OPERATIONS: dict[str, Callable[..., Any]] = {"mean": jnp.mean, "sum": jnp.sum, "min": jnp.min, "max": jnp.max}
_CARRIED = {"uint32": jnp.int32, "uint64": jnp.int64}  # the same bits, and the same sums
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_REDUCED = (*_DTYPES, "uint8", "uint16", "uint32", "uint64", "int8", "int16", "bool")


def all_reduce(tree: Any, operation: Operation = "mean") -> Any:
    """The mean, sum, smallest or largest over all ranks, of each element of each array. Every rank gets the same bits.

    Use it inside of jit, loops and the function of `value_and_grad`, or outside. All ranks call it on a tree of the
    same shapes, at the same place among their calls of it and of `value_and_grad`. The first call for new shapes waits
    for all ranks, and raises Mismatch if they differ. Results have the types that jnp.mean, sum, min and max give. A
    derivative through it is the mean of those of all ranks' losses, as `value_and_grad` makes it.
    """
    if operation not in _OPERATIONS:
        raise InvalidArgument(f"all_reduce has no operation {operation!r}: pass one of {', '.join(_OPERATIONS)}")
    here = context()
    here.check_met("all_reduce")
    leaves, form = jax.tree_util.tree_flatten(tree)
    values = [_array(leaf) for leaf in leaves]
    if here.client is None:
        results = [_OPERATIONS[operation](value[None], axis=0) for value in values]
    else:
        results = _compiled(port(), operation)(values)
    return jax.tree_util.tree_unflatten(form, results)


def _array(leaf: Any) -> Any:
    """The leaf as an array that nobody else can write."""
    try:
        value = leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"all_reduce of a {type(leaf).__name__}: pass numbers and arrays") from error
    if value.dtype.name not in _REDUCED and not jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise InvalidArgument(f"all_reduce of an array of {value.dtype}: convert it to float32 or int32 first")
    return value


@functools.lru_cache(maxsize=64)
def _compiled(port: int, operation: str) -> Callable[[Sequence[Any]], list[Any]]:
    """A program of its own, so that calls outside of jit are compiled once. `port`: of the job for which it is."""
    return jax.jit(lambda values: _reduced(values, operation))


def _reduced(values: Sequence[Any], operation: str) -> list[Any]:
    """What the operation makes of these arrays, with one exchange for all of a type."""
    here, results = context(), [None] * len(values)
    sent = [_prepared(value, operation) for value in values]
    for dtype in sorted({one.dtype.name for one in sent}):
        places = [index for index, one in enumerate(sent) if one.dtype.name == dtype]
        flat = jnp.concatenate([sent[index].ravel() for index in places])
        if operation in ("mean", "sum"):
            found = _exchange(here, flat, here.world_size if operation == "mean" else 1)[None]
        else:
            rows = jnp.zeros((here.world_size, flat.size), flat.dtype).at[here.rank].set(flat)
            found = _exchange(here, rows.ravel(), 1).reshape(rows.shape)
        end = 0
        for index in places:
            begin, end = end, end + sent[index].size
            results[index] = _restored(found[:, begin:end], values[index], operation)
    return results


def _result_dtype(value: Any, operation: str) -> Any:
    return jax.eval_shape(lambda one: _OPERATIONS[operation](one[None], axis=0), value).dtype


def _prepared(value: Any, operation: str) -> Any:
    """The value in a type that servers add up."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        if operation in ("min", "max"):
            raise InvalidArgument(f"complex numbers have no {operation}: pass their parts")
        return jnp.stack([value.real, value.imag])
    if operation in ("mean", "sum"):
        value = value.astype(_result_dtype(value, operation))
    elif value.dtype.name not in (*_DTYPES, *_CARRIED):
        value = value.astype(jnp.int32)
    carrier = _CARRIED.get(value.dtype.name)
    return value if carrier is None else jax.lax.bitcast_convert_type(value, carrier)


def _restored(rows: Any, value: Any, operation: str) -> Any:
    """The result for `value`, of the rows that were received for it."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        real, imaginary = rows[0].reshape(2, *value.shape)
        return jax.lax.complex(real, imaginary)
    dtype = value.dtype if operation in ("min", "max") else _result_dtype(value, operation)
    if dtype.name in _CARRIED:
        rows = jax.lax.bitcast_convert_type(rows, dtype)
    rows = rows.astype(dtype).reshape(len(rows), *value.shape)
    return rows[0] if operation in ("mean", "sum") else _OPERATIONS[operation](rows, axis=0)


def _exchange(here: Membership, flat: Any, divisor: int) -> Any:
    """The sum of these vectors over all ranks, divided. Its derivative is the same of the derivatives."""
    if flat.size == 0:
        return flat
    layer, to = value_layer(here, flat.dtype.name, flat.size, divisor), port()

    def exchanged(flat: Any) -> Any:
        begin, kind = take_turn(jnp.float32(0), to), jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        pushed, token = call_plugin("poseidon_push", (flat, begin), kind, to, layer, divisor, aliases={0: 0})
        found, done = call_plugin("poseidon_pull", (pushed, token), kind, to, layer, aliases={0: 0})
        take_turn(done, to)
        return found

    @jax.custom_vjp
    def reduced(flat: Any) -> Any:
        return exchanged(flat)

    def backward(_: None, slope: Any) -> tuple[Any]:
        return (exchanged(slope) if jnp.issubdtype(flat.dtype, jnp.floating) else None,)

    reduced.defvjp(lambda flat: (exchanged(flat), None), backward)
    return reduced(flat)
