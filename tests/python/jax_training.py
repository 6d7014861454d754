"""Trains a small perceptron with poseidon.jax, as one worker of a job: `python jax_training.py CASE`.

Prints one JSON object: this rank's parameters after each step, and what one process makes of all ranks' gradients.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax as poseidon
from poseidon.jax import process
from waiting import compute_for

STEPS = 3


def make_params(width: int = 33) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    sizes = [(7, width), (width, 65), (65, 3)]
    weights = {f"w{i}": jnp.asarray(draw.normal(size=size, scale=0.1), jnp.float32) for i, size in enumerate(sizes)}
    return weights | {"b": jnp.zeros(3, jnp.float32)}


def loss_fn(params: dict[str, Any], batch: Any) -> Any:
    hidden = jnp.tanh(batch @ params["w0"])
    hidden = jnp.tanh(hidden @ params["w1"])
    hidden = hidden @ params["w1"].T @ params["w1"]  # tied: used three times, pushed once
    return jnp.mean((hidden @ params["w2"] + params["b"]) ** 2)


def batch(step: int, rank: int) -> Any:
    rows = 5 + rank  # ranks with batches of different sizes
    return jnp.asarray(np.random.default_rng((step, rank)).normal(size=(rows, 7)), jnp.float32)


def mean_of_all(params: dict[str, Any], step: int, world_size: int) -> dict[str, Any]:
    """The gradients of all ranks, each as jax.grad gives it, added in rank order and divided."""
    gradient = jax.jit(jax.grad(loss_fn))
    parts = [jax.tree.map(np.asarray, gradient(params, batch(step, rank))) for rank in range(world_size)]
    total = parts[0]
    for part in parts[1:]:
        total = jax.tree.map(np.add, total, part)
    return jax.tree.map(lambda one: one / np.float32(world_size), total)


def exact() -> Any:
    params = kept = poseidon.broadcast(make_params())
    before = jax.tree.map(np.array, kept)
    step = jax.jit(poseidon.value_and_grad(loss_fn))
    equal = True
    for number in range(STEPS):
        _, grads = step(params, batch(number, poseidon.rank()))
        wanted = mean_of_all(params, number, poseidon.world_size())
        equal &= all(np.array_equal(grads[name], wanted[name]) for name in wanted)
        params = jax.tree.map(lambda one, slope: one - 0.01 * slope, params, grads)
    unwritten = all(np.array_equal(before[name], kept[name]) for name in kept)
    return {"equal": equal, "unwritten": unwritten, "params": {name: one.tolist() for name, one in params.items()}}


def dense_loss(params: dict[str, Any], batch: Any) -> Any:
    hidden = jnp.tanh(poseidon.dense(batch[None], params["w0"]) + 0.1)
    hidden = jnp.tanh(poseidon.dense(hidden, params["w1"]))
    return jnp.mean((poseidon.dense(hidden, params["w2"]) + params["b"]) ** 2)


def factors() -> Any:
    """Training with `dense`: its gradients against those of ordinary products, and what each parameter goes by."""
    wide, rank, count = 160, poseidon.rank(), poseidon.world_size()
    params = poseidon.broadcast(make_params(wide))
    step, alone = jax.jit(poseidon.value_and_grad(dense_loss)), jax.jit(jax.grad(dense_loss))
    worst = 0.0
    for number in range(STEPS):
        _, grads = step(params, batch(number, rank))
        parts = [alone(params, batch(number, other)) for other in range(count)]
        wanted = jax.tree.map(lambda *each: sum(each) / count, *parts)
        worst = max(worst, *(float(jnp.abs(grads[name] - wanted[name]).max()) for name in wanted))
        params = jax.tree.map(lambda one, slope: one - 0.01 * slope, params, grads)
    _, eager = poseidon.value_and_grad(dense_loss)(params, batch(0, rank))  # not compiled as a whole
    _, compiled = step(params, batch(0, rank))
    worst = max(worst, *(float(jnp.abs(eager[name] - compiled[name]).max()) for name in eager))
    table, client = poseidon.plan(), process.context().client
    before, steps = client.traffic(), 20
    for _ in range(steps):
        jax.block_until_ready(step(params, batch(0, rank)))
    after = client.traffic()
    moved = after.bytes_sent + after.bytes_received - before.bytes_sent - before.bytes_received
    schemes = {row.layer: row.scheme for row in table}
    planned = sum(row.bytes for row in table)
    return {
        "worst": worst,
        "schemes": schemes,
        "told": {one.name: one.scheme for one in poseidon.synchronization_stats()},
        "moved": moved / steps / planned,
        "params": {name: one.tolist() for name, one in params.items()},
    }


def rounded() -> Any:
    """How far the mean of each kernel is from that of exact gradients, as a part of the largest value."""
    params = poseidon.broadcast(make_params(160))
    _, grads = jax.jit(poseidon.value_and_grad(dense_loss))(params, batch(0, poseidon.rank()))
    count = poseidon.world_size()
    parts = [jax.jit(jax.grad(dense_loss))(params, batch(0, other)) for other in range(count)]
    wanted = jax.tree.map(lambda *each: sum(each) / count, *parts)
    errors = {name: float(jnp.abs(grads[name] - one).max() / jnp.abs(one).max()) for name, one in wanted.items()}
    return errors | {"schemes": {row.layer: row.scheme for row in poseidon.plan()}}


def several_devices() -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.device_put(make_params(), whole)
    try:
        jax.jit(poseidon.value_and_grad(loss_fn))(params, jax.device_put(batch(0, 0), whole))
    except ValueError as error:
        return {"devices": len(jax.devices()), "error": str(error)}
    return "no error"


def watched() -> Any:
    """Steps that take 30 ms, and what `poseidon top` would show of them. Rank 1 is late."""
    params, rank = poseidon.broadcast(make_params(160)), poseidon.rank()
    step = jax.jit(poseidon.value_and_grad(dense_loss))
    for _ in range(70):
        compute_for(0.01 + 0.02 * rank)
        jax.block_until_ready(step(params, batch(0, rank)))
    meter = process.context().meter
    poseidon.barrier()
    return asdict(meter.latest)


def factors_elsewhere() -> Any:
    """Where one call of `dense` is not a parameter's whole gradient it is an ordinary product."""
    params, rows = poseidon.broadcast(make_params(160)), batch(0, 0)  # the same on all ranks

    def twice(params: Any, rows: Any) -> Any:
        return dense_loss(params, rows) + dense_loss(params, rows + 1)

    def scanned(params: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda total, one: (total + dense_loss(params, one[None]), 0), 0.0, rows)[0]

    def mapped(params: Any, rows: Any) -> Any:
        return jax.vmap(lambda one: dense_loss(params, one[None]))(rows).sum()

    def unused(params: Any, rows: Any) -> Any:
        poseidon.dense(rows, params["w0"])
        return params["b"].sum()

    def half(params: Any, rows: Any) -> Any:
        return dense_loss(jax.tree.map(lambda one: one.astype(jnp.bfloat16), params), rows.astype(jnp.bfloat16))

    cases = {
        "twice": twice,
        "scan": scanned,
        "vmap": mapped,
        "checkpoint": jax.checkpoint(dense_loss),
        "jit": jax.jit(dense_loss),
        "unused": unused,
        "half": half,
    }
    worst = {}
    for name, loss in cases.items():
        _, grads = jax.jit(poseidon.value_and_grad(loss))(params, rows)
        wanted = jax.jit(jax.grad(loss))(params, rows)
        worst[name] = max(float(jnp.abs(grads[key] - wanted[key]).max()) for key in wanted)
    return worst


def tied() -> Any:
    """A kernel of `dense` that something else uses, too."""
    params = poseidon.broadcast(make_params(160))

    def loss(params: Any, rows: Any) -> Any:
        return dense_loss(params, rows) + params["w1"].sum()

    try:
        jax.jit(poseidon.value_and_grad(loss))(params, batch(0, 0))
    except poseidon.PoseidonError as error:
        return str(error)
    return "no error"


def scan() -> Any:
    """All steps in one jit, with remat; the last parameters."""
    batches = jnp.stack([batch(number, poseidon.rank())[:5] for number in range(STEPS)])

    def one_step(params: Any, rows: Any) -> Any:
        value, grads = poseidon.value_and_grad(jax.checkpoint(loss_fn))(params, rows)
        return jax.tree.map(lambda one, slope: one - 0.01 * slope, params, grads), value

    params, _ = jax.jit(lambda params: jax.lax.scan(one_step, params, batches))(poseidon.broadcast(make_params()))
    return {name: one.tolist() for name, one in params.items()}


def program() -> Any:
    """The text of a compiled step."""
    params = poseidon.broadcast(make_params())
    step = jax.jit(lambda params, rows: poseidon.value_and_grad(loss_fn)(params, rows))
    return step.lower(params, batch(0, 0)).as_text()


def two_calls() -> Any:
    """Two calls in one program, which XLA may run in any order, against the means of each."""
    params, rank, count = poseidon.broadcast(make_params()), poseidon.rank(), poseidon.world_size()

    @jax.jit
    def both(params: Any, first: Any, second: Any) -> Any:
        gradient = poseidon.value_and_grad(loss_fn)
        return gradient(params, first)[1], gradient(params, second)[1]

    equal = True
    for number in (0, 2, 4):
        found = both(params, batch(number, rank), batch(number + 1, rank))
        for part, wanted in zip(found, (mean_of_all(params, number + i, count) for i in (0, 1)), strict=True):
            equal &= all(np.array_equal(part[name], wanted[name]) for name in wanted)
    return equal


def delayed(rows: Any, rounds: Any) -> Any:
    """The same rows, after `rounds` products of matrices: XLA runs what is ready first."""
    slow = jax.lax.fori_loop(0, rounds, lambda _, one: jnp.tanh(one @ one), jnp.ones((256, 256)))
    return rows + 0 * slow.sum()


def opposite_orders() -> Any:
    """Pairs of independent calls of which each rank is ready for another one first, against the means of each."""
    params, rank, count = poseidon.broadcast(make_params()), poseidon.rank(), poseidon.world_size()
    gradient = poseidon.value_and_grad(lambda *given: loss_fn(given[0], delayed(*given[1:])))

    def inner(params: Any, rows: Any, rounds: Any) -> Any:
        return gradient(params, rows, rounds)[1]

    def in_scan(params: Any, rows: Any, rounds: Any) -> Any:
        found = jax.lax.scan(lambda _, one: (0, inner(params, one, rounds)), 0, rows[None])[1]
        return jax.tree.map(lambda one: one[0], found)

    shared, first, second = jax.jit(inner), jax.jit(inner), jax.jit(lambda *given: inner(*given))

    def pair(one: Any, other: Any) -> Any:
        return lambda params, a, b, c, d: (one(params, a, b), other(params, c, d))

    pairs = {
        "one inner program twice": jax.jit(pair(shared, shared)),
        "a call and one in a scan": jax.jit(pair(inner, in_scan)),
        "two programs at once": pair(first, second),
    }
    wanted = [mean_of_all(params, step, count) for step in (0, 1)]
    rounds = (100, 0) if rank == 0 else (0, 100)
    return {
        name: all(
            np.allclose(part[key], mean[key], atol=1e-6)
            for part, mean in zip(
                both(params, batch(0, rank), rounds[0], batch(1, rank), rounds[1]), wanted, strict=True
            )
            for key in mean
        )
        for name, both in pairs.items()
    }


def unused_on_one() -> Any:
    """A parameter that only rank 1's loss uses, and one that none uses."""
    params = {"all": jnp.ones(2), "none": jnp.ones(2), "one": jnp.ones(2)}

    def loss(params: Any) -> Any:
        return params["all"].sum() + (params["one"].sum() if poseidon.rank() == 1 else 0)

    return {name: one.tolist() for name, one in jax.jit(poseidon.value_and_grad(loss))(params)[1].items()}


def optax_and_flax() -> Any:
    """A convolutional network of Flax with Adam of Optax, on batches of one size, against one process."""
    import optax
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, images: Any) -> Any:
            hidden = linen.relu(linen.Conv(8, (3, 3))(images))
            return linen.Dense(10)(linen.relu(linen.Dense(64)(hidden.reshape(len(images), -1))))

    network, rank, count, rows = Network(), poseidon.rank(), poseidon.world_size(), 4
    draw = np.random.default_rng(3)
    images = jnp.asarray(draw.normal(size=(STEPS, count * rows, 8, 8, 1)), jnp.float32)
    labels = jnp.asarray(draw.integers(0, 10, (STEPS, count * rows)))

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, inputs), targets).mean()

    def train(gradient: Any, params: Any, own: slice) -> Any:
        optimizer = optax.adam(1e-2)
        state = optimizer.init(params)
        step = jax.jit(gradient)
        for number in range(STEPS):
            _, grads = step(params, images[number, own], labels[number, own])
            updates, state = optimizer.update(grads, state)
            params = optax.apply_updates(params, updates)
        return params

    start = poseidon.broadcast(network.init(jax.random.key(rank), images[0]))
    mine = train(poseidon.value_and_grad(loss), start, slice(rank * rows, (rank + 1) * rows))
    alone = train(jax.value_and_grad(loss), start, slice(None))
    gap = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (mine, alone)), strict=True))
    return {"gap": gap, "params": [one.tolist() for one in jax.tree.leaves(mine)]}


def lost_peer() -> Any:
    params = poseidon.broadcast(make_params())
    step = jax.jit(poseidon.value_and_grad(loss_fn))
    jax.block_until_ready(step(params, batch(0, poseidon.rank())))
    if poseidon.rank() == 1:
        os._exit(9)
    try:
        jax.block_until_ready(step(params, batch(1, 0)))
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "failure": type(poseidon.failure()).__name__}
    return "no error"


def drifting() -> Any:
    """Rank 1 changes a parameter after two steps; the steps are those of one program, and then of another in a scan."""
    params = poseidon.broadcast(make_params())
    step = poseidon.value_and_grad(loss_fn)

    def train(params: dict[str, Any], rows: Any) -> tuple[dict[str, Any], Any]:
        loss, grads = step(params, rows)
        return jax.tree.map(lambda one, grad: one - 0.1 * grad, params, grads), loss

    steps = 0
    try:
        compiled = jax.jit(train, donate_argnums=0)
        for number in range(3):
            params, _ = jax.block_until_ready(compiled(params, batch(number, poseidon.rank())))
            steps += 1
        if poseidon.rank() == 1:
            params["w1"] = params["w1"].at[2, 3].add(1e-6)
        all_rows = jnp.stack([batch(number, 0) for number in range(4)])
        params, _ = jax.block_until_ready(jax.jit(lambda params: jax.lax.scan(train, params, all_rows))(params))
    except jax.errors.JaxRuntimeError as error:
        return {"steps": steps, "error": str(error), "failure": str(poseidon.failure())}
    return "no error"


def different() -> Any:
    params = make_params(33 + poseidon.rank())
    try:
        jax.jit(poseidon.value_and_grad(loss_fn))(params, batch(0, poseidon.rank()))
    except poseidon.PoseidonError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return "no error"


if __name__ == "__main__":
    poseidon.init(timeout=20)
    cases = (
        *(exact, scan, program, two_calls, opposite_orders, unused_on_one, optax_and_flax, lost_peer, drifting),
        *(different, factors, rounded, factors_elsewhere, tied, watched, several_devices),
    )
    print(json.dumps({case.__name__: case for case in cases}[sys.argv[1]]()))
