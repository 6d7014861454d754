"""poseidon.jax.Recovery in programs whose workers may be killed: `python jax_recovery.py CASE [STEPS] [donate]`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax as poseidon
from killed_runs import answer, digest, note

ROWS, WIDE = 4, 64


def loss_fn(params: Any, inputs: Any, targets: Any, key: Any) -> Any:
    hidden = jnp.tanh(poseidon.dense(inputs, params["w0"]) + params["b0"])
    hidden *= jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((poseidon.dense(hidden, params["w1"]) - targets) ** 2)


def train_step(state: Any, inputs: Any, targets: Any) -> Any:
    """Adam, with a key that goes on, and a loss that all ranks have alike."""
    key = jax.random.fold_in(state["key"], poseidon.rank())
    loss, grads = poseidon.value_and_grad(loss_fn)(state["params"], inputs, targets, key)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], grads)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["second"], grads)
    params = jax.tree.map(lambda p, m, v: p - 0.01 * m / (jnp.sqrt(v) + 1e-6), state["params"], first, second)
    return {
        "params": params,
        "first": first,
        "second": second,
        "key": jax.random.split(state["key"], 1)[0],
        "losses": state["losses"] + poseidon.all_reduce(loss),
        "name": state["name"],
    }


def batch(step: int, rank: int, size: int) -> tuple[Any, Any]:
    draw = np.random.default_rng([step, rank, size])
    inputs = draw.normal(size=(ROWS, WIDE)).astype(np.float32)
    return inputs, np.tanh(inputs[:, :8] + np.float32(0.1 * np.random.random()))


def train() -> Any:
    """What it has in the end."""
    steps = int(sys.argv[2])
    draw = np.random.default_rng(poseidon.rank())  # all begin with rank 0's values
    params = {"w0": draw.normal(size=(WIDE, WIDE)).astype(np.float32) / 8, "b0": np.zeros(WIDE, np.float32)}
    params["w1"] = draw.normal(size=(WIDE, 8)).astype(np.float32) / 8
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "first": zeros, "second": zeros, "key": jax.random.key(1), "losses": 0.0, "name": 7}
    recovery = poseidon.Recovery(state, seed=3)
    step = jax.jit(train_step, donate_argnums=0 if "donate" in sys.argv else ())
    sizes = ""
    while recovery.until(steps):
        with recovery.attempt():
            note(recovery.step)
            if os.environ.get("DIES") == f"{os.environ['RANK']} {recovery.step}":
                os.kill(os.getpid(), signal.SIGKILL)
            size = poseidon.world_size()
            recovery.state = step(recovery.state, *batch(recovery.step, poseidon.rank(), size))
        sizes = sizes[: recovery.step - 1] + str(size)
    leaves = jax.tree.leaves({name: part for name, part in recovery.state.items() if name != "key"})
    schemes = {row.layer: row.scheme for row in poseidon.plan()}
    made = digest(np.asarray(leaf) for leaf in leaves)
    return {"digest": made, "failures": len(recovery.history), "schemes": schemes, "sizes": sizes}


def _refusal(of: Callable[[], Any]) -> str:
    try:
        of()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was refused"


def misuse() -> Any:
    """The texts of what is refused."""
    start = {"w": np.ones(3, np.float32)}
    texts = {"empty": _refusal(lambda: poseidon.Recovery({"f": max}))}
    recovery = poseidon.Recovery(start)
    uses: dict[str, Callable[[], Any]] = {
        "unread": lambda: setattr(recovery, "state", start),
        "unset": lambda: recovery.state,
        "reshaped": lambda: setattr(recovery, "state", {"w": recovery.state["w"][:2]}),
    }

    def attempt(use: Callable[[], Any]) -> None:
        with recovery.attempt():
            use()

    return texts | {name: _refusal(lambda use=use: attempt(use)) for name, use in uses.items()}


def early() -> Any:
    """What exchanges before the workers have met."""
    gradient = poseidon.value_and_grad(lambda params: params["w"].sum())
    start = {"w": np.ones(3, np.float32)}
    calls = (lambda: gradient(start), lambda: poseidon.all_reduce(1.0), lambda: poseidon.broadcast(start))
    return [_refusal(call) for call in calls]


def snapshots() -> Any:
    """A run that has a directory."""
    recovery = poseidon.Recovery({"w": np.arange(5, dtype=np.float32)}, directory=os.environ["DIRECTORY"], every=4)
    begun = recovery.step
    gradient = jax.jit(poseidon.value_and_grad(lambda params, scale: (params["w"] ** 2).sum() * scale))
    while recovery.until(int(os.environ["STEPS"])):
        with recovery.attempt():
            state = recovery.state
            _, grads = gradient(state, (1 + poseidon.rank()) * 0.01 * recovery.step)
            recovery.state = jax.tree.map(lambda one, grad: one - 0.1 * grad, state, grads)
    return {"begun": begun, "w": recovery.state["w"].tolist()}


if __name__ == "__main__":
    poseidon.init()
    case = {"train": train, "misuse": misuse, "early": early, "snapshots": snapshots}[sys.argv[1]]
    answer(poseidon.rank(), case())
