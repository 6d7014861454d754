"""A two-layer network in NumPy alone: servers hold and update the parameters, workers push gradients and pull them.

poseidon run -n 4 examples/push_pull.py
python examples/push_pull.py
"""

from __future__ import annotations

import argparse

import numpy as np

import poseidon

INPUTS, HIDDEN, CLASSES = 64, 256, 10


def make_pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` noisy copies of ten fixed patterns (count × INPUTS) and which pattern each is."""
    patterns = np.random.default_rng(0).normal(size=(CLASSES, INPUTS))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    return (patterns[labels] + rng.normal(scale=1.5, size=(count, INPUTS))).astype(np.float32), labels


def initial_parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    hidden = rng.normal(scale=INPUTS**-0.5, size=(INPUTS, HIDDEN))
    out = rng.normal(scale=HIDDEN**-0.5, size=(HIDDEN, CLASSES))
    return {"out": out.astype(np.float32), "hidden": hidden.astype(np.float32)}


def train_step(exchange: poseidon.Exchange, parameters: dict[str, np.ndarray], batch: int, seed: int) -> float:
    """One step on this worker's share of the batch; returns its loss."""
    pictures, labels = make_pictures(batch // exchange.world_size, seed * exchange.world_size + exchange.rank)
    hidden = np.maximum(pictures @ parameters["hidden"], 0)
    scores = hidden @ parameters["out"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances = scores / scores.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).mean()

    chances[rows, labels] -= 1
    chances /= len(labels)
    passed_on = (chances @ parameters["out"].T) * (hidden > 0)  # before the new parameters arrive
    # Each layer's exchange starts with its gradient and runs while the next one is computed.
    exchange.push_pull("out", hidden.T @ chances, out=parameters["out"], sync=False)
    exchange.push_pull("hidden", pictures.T @ passed_on, out=parameters["hidden"], sync=False)
    exchange.wait_all()
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=240, help="pictures per step, of all workers together")
    args = parser.parse_args()

    with poseidon.connect() as exchange:
        parameters = initial_parameters()
        exchange.declare(parameters)
        exchange.set_rule(parameters, poseidon.UpdateRule("sgd", lr=0.1, momentum=0.9))
        for step in range(args.steps):
            loss = train_step(exchange, parameters, args.batch, step)
            if exchange.rank == 0 and (step % 20 == 0 or step == args.steps - 1):
                print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
