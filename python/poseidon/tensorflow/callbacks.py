"""Callbacks for `model.fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from poseidon.adapter.agreement import check_same
from poseidon.tensorflow.context import context


class MetricAverage(keras.callbacks.Callback):
    """Replaces the metrics of each epoch by their means over all workers.

    Put it before callbacks that decide by metrics, such as EarlyStopping and ReduceLROnPlateau: then all ranks decide
    the same. Each rank counts the same, however many examples it has. Raises Mismatch if ranks have different metrics.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        control = context().control
        if control is None or not logs:
            return
        names = sorted(name for name, value in logs.items() if np.isscalar(value))
        check_same(control, "\n".join(names), "list of metric")
        values = np.array([logs[name] for name in names], np.float64)
        control.add(values, context().world_size)
        logs.update(zip(names, values.tolist(), strict=True))
