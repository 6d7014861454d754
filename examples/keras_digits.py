"""Keras on scikit-learn's digits: each worker trains on its part, and all have the same model.

poseidon run -n 2 examples/keras_digits.py
python examples/keras_digits.py
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import poseidon.tensorflow as poseidon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    poseidon.init()
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    rank, count = poseidon.rank(), poseidon.world_size()
    mine = slice(rank, len(images) // count * count, count)  # as many on each rank
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.Adam(0.001))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    verbose = 2 if rank == 0 else 0
    model.fit(images[mine], labels[mine], epochs=args.epochs, verbose=verbose, callbacks=[poseidon.MetricAverage()])


if __name__ == "__main__":
    main()
