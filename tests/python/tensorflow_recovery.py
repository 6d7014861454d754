"""Keras trains a small network in a job whose workers may be killed: `python tensorflow_recovery.py`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import poseidon.tensorflow as poseidon
from killed_runs import answer, digest, note

WIDE, BATCHES, EPOCHS = 24, 6, 8


class Numbers(keras.utils.PyDataset):
    """Batches of this rank: a function of their number."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        draw = np.random.default_rng([index, self._rank])
        inputs = draw.normal(size=(8, WIDE)).astype(np.float32)
        return inputs, np.tanh(inputs[:, :3])


class Noting(keras.callbacks.Callback):
    """Says to which step training has come, and counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        note(int(self.model.optimizer.iterations))
        self.heard += 1


def main() -> None:
    """Trains, and says what it has in the end."""
    poseidon.init()
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((WIDE,)),
        keras.layers.Dense(40),
        keras.layers.LayerNormalization(),
        keras.layers.Dropout(0.2),
    ]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    model.compile(poseidon.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0)), "mse", metrics=["mae"])
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=1e-3)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=20, restore_best_weights=True)
    noting, recovery = Noting(), poseidon.RecoveryCallback(seed=5)
    model.fit(
        Numbers(poseidon.rank()),
        epochs=EPOCHS,
        validation_data=Numbers(99),
        callbacks=[plateau, recovery, stopping, noting],
        verbose=0,
        shuffle=False,
    )
    values = [one.numpy() for one in (*model.trainable_variables, *model.optimizer.variables)]
    assert recovery.recovery is not None
    failures = len(recovery.recovery.history)
    rate = float(model.optimizer.learning_rate)
    made = {"digest": digest(values), "failures": failures, "lr": rate, "heard": noting.heard, "best": stopping.best}
    answer(poseidon.rank(), made)


if __name__ == "__main__":
    main()
