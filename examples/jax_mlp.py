"""A perceptron in plain JAX on the digits of scikit-learn: four lines differ from training alone.

poseidon run -n 2 examples/jax_mlp.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import poseidon.jax as poseidon

BATCH, STEPS, RATE = 32, 300, 0.1


def logits(params: Any, images: Any) -> Any:
    return jax.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params: Any, images: Any, labels: Any) -> Any:
    scores = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


@jax.jit
def train_step(params: Any, images: Any, labels: Any) -> Any:
    loss, grads = poseidon.value_and_grad(loss_fn)(params, images, labels)
    return jax.tree.map(lambda one, grad: one - RATE * grad, params, grads), loss


def main() -> None:
    poseidon.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    key1, key2 = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(key1, (64, 128)) * 0.1,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(key2, (128, 10)) * 0.1,
        "b2": jnp.zeros(10),
    }
    params = poseidon.broadcast(params)
    draw = np.random.default_rng(poseidon.rank())
    for _ in range(STEPS):
        rows = draw.integers(0, 1500, BATCH)
        params, loss = train_step(params, images[rows], labels[rows])
    correct = np.mean(np.argmax(logits(params, images[1500:]), axis=1) == labels[1500:])
    if poseidon.rank() == 0:
        print(f"loss {float(loss):.3f}, accuracy on images that were not trained on {correct:.1%}")


if __name__ == "__main__":
    main()
