"""Poseidon for TensorFlow 2 and Keras 3.

In a program:

    import poseidon.tensorflow as poseidon

    poseidon.init()
    model.compile(poseidon.DistributedOptimizer(keras.optimizers.Adam()), loss)
"""

from poseidon.errors import PoseidonError
from poseidon.tensorflow.callbacks import MetricAverage
from poseidon.tensorflow.context import barrier, broadcast_variables, init, rank, shutdown, world_size
from poseidon.tensorflow.optimizer import DistributedOptimizer
from poseidon.tensorflow.recovery import RecoveryCallback
from poseidon.tensorflow.values import all_reduce

__all__ = [
    "DistributedOptimizer",
    "MetricAverage",
    "PoseidonError",
    "RecoveryCallback",
    "all_reduce",
    "barrier",
    "broadcast_variables",
    "init",
    "rank",
    "shutdown",
    "world_size",
]
