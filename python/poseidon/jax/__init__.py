"""Poseidon for JAX: gradients that are means over all ranks, exchanged while backward still runs.

In a program:

    import poseidon.jax as poseidon

    poseidon.init()
    params = poseidon.broadcast(params)
    loss, grads = poseidon.value_and_grad(loss_fn)(params, batch)
"""

from poseidon.errors import PoseidonError
from poseidon.jax.dense import dense
from poseidon.jax.gradients import plan, synchronization_stats, value_and_grad
from poseidon.jax.process import barrier, broadcast, failure, init, rank, shutdown, world_size
from poseidon.jax.recovery import Recovery
from poseidon.jax.values import all_reduce

__all__ = [
    "PoseidonError",
    "Recovery",
    "all_reduce",
    "barrier",
    "broadcast",
    "dense",
    "failure",
    "init",
    "plan",
    "rank",
    "shutdown",
    "synchronization_stats",
    "value_and_grad",
    "world_size",
]
