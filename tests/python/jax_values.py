"""Values that all ranks share, random keys, modules and memory, with poseidon.jax, as one worker of a job.

Prints one JSON object: what each case has found. All cases run in one job.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax as poseidon

ROWS = 4


def rows_of(rank: int, step: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng((step, rank)).normal(size=(ROWS, 5)), jnp.float32)


def weights() -> Any:
    return jnp.asarray(np.random.default_rng(9).normal(size=(5, 3)), jnp.float32)


def summed(tree: Any) -> float:
    return float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(tree)))


def types_and_operations() -> list[str]:
    """Every type and operation, in jit and outside, against NumPy's result of all ranks; what differs."""
    wrong = []
    types = ("float32", "bfloat16", "uint32", "int8", "bool", "complex64")
    for dtype in types:
        every = [jnp.asarray(np.arange(6).reshape(2, 3) * (r + 1) % 5, dtype) for r in range(poseidon.world_size())]
        own = {
            "array": every[poseidon.rank()],
            "number": every[poseidon.rank()][0, 1],
            "empty": jnp.zeros((0, 2), dtype),
        }
        operations = ("mean", "sum") if dtype == "complex64" else ("mean", "sum", "min", "max")

        def call(tree: Any, operations: Any = operations) -> Any:
            return {operation: poseidon.all_reduce(tree, operation) for operation in operations}

        calls: list[Any] = [jax.jit(call), call] if dtype == "float32" else [jax.jit(call)]
        for results in [one(own) for one in calls]:
            for operation, found in results.items():
                wanted = getattr(np, operation)(np.stack(every), axis=0)
                equal = np.array_equal(found["array"], wanted) and np.array_equal(found["number"], wanted[0, 1])
                dtype_of = jax.eval_shape(partial(getattr(jnp, operation), axis=0), jnp.stack(every)).dtype
                if not equal or found["array"].dtype != dtype_of or found["empty"].shape != (0, 2):
                    wrong.append(f"{dtype} {operation}")
    return wrong


def under_value_and_grad() -> float:
    """Statistics of the batches of all ranks, in the loss: gradients against those of one process."""
    size = poseidon.world_size()

    def loss(params: Any, rows: Any) -> Any:
        hidden = rows @ params
        mean, square = poseidon.all_reduce((hidden.mean(0), (hidden**2).mean(0)))
        largest = poseidon.all_reduce(hidden.max(), "max")
        return (((hidden - mean) / jnp.sqrt(square + 1)) ** 3).mean() + largest, mean

    def alone(params: Any) -> Any:
        hidden = jnp.stack([rows_of(rank) @ params for rank in range(size)])
        mean, square = hidden.mean((0, 1)), (hidden**2).mean((0, 1))
        return (((hidden - mean) / jnp.sqrt(square + 1)) ** 3).mean() + hidden.max()

    wanted = jax.grad(alone)(weights())
    found = jax.jit(poseidon.value_and_grad(loss, has_aux=True))(weights(), rows_of(poseidon.rank()))[1]
    return float(jnp.abs(found - wanted).max())


def in_loops() -> list[float]:
    """Inside of a scan and of a branch, and between exchanges of gradients."""

    def loss(params: Any, rows: Any) -> Any:
        total, _ = jax.lax.scan(lambda sum_, row: (sum_ + poseidon.all_reduce((row @ params).sum()), None), 0.0, rows)
        return jax.lax.cond(total > -1e9, lambda: total, lambda: 0.0)

    @jax.jit
    def step(params: Any, rows: Any) -> Any:
        first, grads = poseidon.value_and_grad(loss)(params, rows)
        middle = poseidon.all_reduce(jnp.float32(poseidon.rank()), "sum")
        second, more = poseidon.value_and_grad(loss)(params + middle, rows)
        return first, second, jnp.abs(grads).sum() + jnp.abs(more).sum()

    return [float(one) for one in step(weights(), rows_of(poseidon.rank()))]


def plateau() -> list[float]:
    """A learning rate that follows the loss, and line searches; the parameters' sums."""
    import optax

    own = rows_of(poseidon.rank())

    def loss(params: Any) -> Any:
        return ((own @ params - 1) ** 2).mean()

    @jax.custom_vjp
    def mean_loss(params: Any) -> Any:
        return poseidon.all_reduce(loss(params))

    def forward(params: Any) -> Any:
        value, grads = poseidon.value_and_grad(loss)(params)
        return poseidon.all_reduce(value), grads

    mean_loss.defvjp(forward, lambda grads, slope: (slope * grads,))

    def alone(params: Any) -> Any:
        return (
            sum(((rows_of(r) @ params - 1) ** 2).mean() for r in range(poseidon.world_size())) / poseidon.world_size()
        )

    def train(make: Any, function: Any) -> Any:
        optimizer, params = make(), weights()
        state, gradient = optimizer.init(params), jax.value_and_grad(function)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            value, grads = gradient(params)
            updates, state = optimizer.update(grads, state, params, value=value, grad=grads, value_fn=function)
            return optax.apply_updates(params, updates), state

        for _ in range(6):
            params, state = step(params, state)
        return params

    gaps = []
    for make in (
        lambda: optax.chain(optax.sgd(3.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
        optax.lbfgs,
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)),
    ):
        found, wanted = train(make, mean_loss), train(make, alone)
        gaps.append(float((jnp.abs(found - wanted) / (1 + jnp.abs(wanted))).max()))
    return gaps


def not_compiled() -> float:
    """With jit disabled: gradients against those with it, and a shared value."""

    def loss(params: Any, rows: Any) -> Any:
        return (jax.nn.relu(poseidon.dense(rows, params["w"])) ** 2).mean() + params["b"].sum()

    params, rows = {"w": weights(), "b": jnp.ones(3)}, rows_of(poseidon.rank())
    _, wanted = jax.jit(poseidon.value_and_grad(loss))(params, rows)
    with jax.disable_jit():
        value, found = poseidon.value_and_grad(loss)(params, rows)
        mean = poseidon.all_reduce(value)
    again = poseidon.all_reduce(value)
    return max(float(jnp.abs(found[name] - wanted[name]).max()) for name in wanted) + abs(float(mean - again))


def keys_and_modules() -> list[Any]:
    """A broadcast of rank 1's keys, numbers and module."""
    rank = poseidon.rank()
    tree: dict[str, Any] = {
        "key": jax.random.key(rank),
        "keys": jax.random.split(jax.random.key(rank, impl="rbg"), 3),
        "raw": jax.random.PRNGKey(rank),
        "number": rank,
        "function": jax.nn.relu,
        "flag": np.bool_(rank),
        "empty": jnp.zeros((0, 3)),
    }
    found = poseidon.broadcast(tree, root=1)
    assert found["function"] is jax.nn.relu
    assert found["keys"].dtype == tree["keys"].dtype
    data = [found["raw"], *(jax.random.key_data(found[name]) for name in ("key", "keys"))]
    drawn = jax.random.normal(found["key"], (3,)).tolist()
    assert drawn == jax.random.normal(jax.random.key(1), (3,)).tolist()
    return [[one.tolist() for one in data], int(found["number"]), bool(found["flag"]), drawn]


def refusals() -> list[str]:
    """What cannot work says what to do, before anything is sent."""

    def text(call: Any) -> str:
        try:
            call()
        except poseidon.PoseidonError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return [
        text(lambda: poseidon.all_reduce(1.0, "product")),  # type: ignore[arg-type]
        text(lambda: poseidon.all_reduce("text")),
        text(lambda: poseidon.all_reduce(jax.random.key(0))),
        text(lambda: poseidon.all_reduce(jnp.complex64(1), "max")),
        text(lambda: poseidon.value_and_grad(lambda tree: tree["w"].sum())({"w": jnp.ones(2), "count": 3})),
        text(lambda: poseidon.broadcast({"w": jnp.ones(2 + poseidon.rank())})),
    ]


def memory_used_again() -> float:
    """Donated parameters, and a NumPy batch that is filled again as soon as a step has begun: the sum of parameters
    against that of new arrays in every step."""

    def loss(params: Any, rows: Any) -> Any:
        return ((rows @ params - 1) ** 2).mean()

    def step(params: Any, rows: Any) -> Any:
        value, grads = poseidon.value_and_grad(loss)(params, rows)
        return params - 0.1 * grads, value

    donating, plain = jax.jit(step, donate_argnums=0), jax.jit(step)
    mine, wanted, shared = weights(), weights(), np.zeros((), np.float32)
    for number in range(20):
        rows = rows_of(poseidon.rank(), number)
        wanted, value = plain(wanted, rows)
        mine, other = donating(mine, jnp.array(rows))
        shared[...] = value
        first, shared[...] = poseidon.all_reduce(shared), -1.0
        assert float(first) == float(poseidon.all_reduce(other))
    return float(jnp.abs(mine - wanted).max())


def flax_statistics() -> str:
    """A module of Flax NNX as the first argument, whose statistics JAX would lose."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(0))

    try:
        jax.jit(poseidon.value_and_grad(lambda model, rows: (model.norm(rows) ** 2).mean()))(Net(), rows_of(0))
    except poseidon.PoseidonError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    poseidon.init(timeout=20)
    cases = (
        *(types_and_operations, under_value_and_grad, in_loops, plateau, not_compiled, keys_and_modules, refusals),
        *(memory_used_again, flax_statistics),
    )
    print(json.dumps({case.__name__: case() for case in cases}))
