#!/usr/bin/env python3
"""VGG19 replayed by JAX's and TensorFlow's adapters on hosts with ports of a limited rate. Needs root.

    python bench/adapter_replay.py jax --trace trace.json
    python bench/adapter_replay.py tensorflow

Each layer sleeps for its time of the forward and of the backward pass, in proportion to its FLOPs. Fully connected
layers multiply K random rows. All else is the adapter's own: one compiled step, gradients that leave while backward
sleeps on. `--scale a` divides both dimensions of every weight and the batch, as in `poseidon bench train`. The same
hosts also train without exchange. Printed are both steps, their ratio, and how many layers were exchanged before the
backward pass ended. `--trace` writes the last step of rank 0 for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from poseidon.adapter.stats import LayerSynchronization
from poseidon.launch import launch
from poseidon.models import ModelTable, model_table, scaled
from poseidon.report import RankRecord, Report, Span, write_trace
from poseidon.testbed import Testbed

BAR = 0.97  # of the speed without exchange
WARM_UP = 2


@dataclass(frozen=True)
class Layer:
    """A layer of the replay: its weight's shape in the framework's order, and what it sleeps."""

    shape: tuple[int, ...]
    connected: bool
    forward_s: float
    backward_s: float


def layers_of(table: ModelTable, compute_s: float) -> list[Layer]:
    """In forward order. Frameworks have a kernel as inputs x outputs."""
    return [
        Layer(spec.weight_shape[::-1] if spec.kind == "fc" else spec.weight_shape, spec.kind == "fc", forward, backward)
        for spec, (forward, backward) in zip(table.layers, table.durations(compute_s), strict=True)
    ]


def with_jax(layers: Sequence[Layer], rows: int, exchanges: bool) -> tuple[Callable[[], None], Any]:
    """A step by JAX, and what tells about its exchanges."""
    import jax
    import jax.numpy as jnp

    import poseidon.jax as poseidon

    if exchanges:
        poseidon.init()

    def slept(seconds: float, signal: Any) -> Any:
        def sleep(value: Any) -> Any:
            time.sleep(seconds)
            return value

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(signal.shape, signal.dtype), signal)

    def passing(layer: Layer) -> Callable[[Any, Any], Any]:
        @jax.custom_vjp
        def run(signal: Any, weight: Any) -> Any:
            return slept(layer.forward_s, signal)

        def backward(weight: Any, slope: Any) -> tuple[Any, Any]:
            after = slept(layer.backward_s, slope)
            return after, None if layer.connected else jnp.broadcast_to(after[0, 0], weight.shape)

        run.defvjp(lambda signal, weight: (slept(layer.forward_s, signal), weight), backward)
        return run

    passes = [passing(layer) for layer in layers]

    def loss(params: Sequence[Any], signal: Any) -> Any:
        for layer, run, weight in zip(layers, passes, params, strict=True):
            if layer.connected:
                product = poseidon.dense if exchanges else jnp.matmul
                signal = product(jnp.broadcast_to(signal, (rows, layer.shape[0])), weight).mean(1, keepdims=True)
                signal = run(signal, jnp.zeros(()))
            else:
                signal = run(signal, weight)
        return jnp.square(signal).mean()  # so that backward begins when forward has ended

    gradient = poseidon.value_and_grad(loss) if exchanges else jax.value_and_grad(loss)
    state = [jnp.zeros(layer.shape, jnp.float32) for layer in layers]

    @jax.jit
    def step(params: Sequence[Any], signal: Any) -> Any:
        _, slopes = gradient(params, signal)
        return [weight - 0.01 * slope for weight, slope in zip(params, slopes, strict=True)]

    signal = jnp.ones((rows, 1), jnp.float32)

    def one() -> None:
        state[:] = jax.block_until_ready(step(list(state), signal))

    return one, poseidon


def with_tensorflow(layers: Sequence[Layer], rows: int, exchanges: bool) -> tuple[Callable[[], None], Any]:
    """The same by TensorFlow."""
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(0.01)
    if exchanges:
        import poseidon.tensorflow as poseidon

        poseidon.init()
        optimizer = poseidon.DistributedOptimizer(optimizer)

    def slept(seconds: float, signal: Any) -> Any:
        def sleep(value: Any) -> Any:
            time.sleep(seconds)
            return value

        answer = tf.numpy_function(sleep, [signal], tf.float32)
        answer.set_shape(signal.shape)
        return answer

    def passing(layer: Layer) -> Callable[[Any, Any], Any]:
        @tf.custom_gradient
        def run(signal: Any, weight: Any) -> Any:
            def backward(slope: Any) -> tuple[Any, Any]:
                after = slept(layer.backward_s, slope)
                return after, None if layer.connected else tf.fill(layer.shape, after[0, 0])

            return slept(layer.forward_s, signal), backward

        return run

    passes = [passing(layer) for layer in layers]
    weights = [tf.Variable(tf.zeros(layer.shape), name=f"layer{index}") for index, layer in enumerate(layers)]
    optimizer.build(weights)
    start = tf.ones((rows, 1))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            signal = start
            for layer, run, weight in zip(layers, passes, weights, strict=True):
                if layer.connected:
                    product = tf.matmul(tf.broadcast_to(signal, (rows, layer.shape[0])), weight)
                    signal = run(tf.reduce_mean(product, axis=1, keepdims=True), tf.zeros(()))
                else:
                    signal = run(signal, tf.convert_to_tensor(weight))
            loss = tf.reduce_mean(tf.square(signal))
        optimizer.apply(tape.gradient(loss, weights), weights)

    def one() -> None:
        step()
        weights[0].read_value()

    return one, optimizer


def work(args: argparse.Namespace) -> None:
    """One worker: warms up, trains, and writes its steps."""
    table = scaled(model_table("VGG19"), args.scale)
    layers = layers_of(table, args.compute)
    make = with_jax if args.adapter == "jax" else with_tensorflow
    exchanges = args.worker == "poseidon"
    step, told = make(layers, table.batch, exchanges)
    ended = []
    for _ in range(WARM_UP + args.steps):
        step()
        ended.append(time.perf_counter())
    steps = [later - earlier for earlier, later in itertools.pairwise(ended[WARM_UP - 1 :])]
    stats = [asdict(one) for one in told.synchronization_stats()] if exchanges else []
    rank = os.environ["RANK"]
    (Path(args.out) / f"{args.worker}-{rank}.json").write_text(json.dumps({"steps": steps, "stats": stats}))


def measured(args: argparse.Namespace, method: str, hosts: Testbed, folder: Path) -> tuple[float, list[Any]]:
    """The median step of the slowest rank, and rank 0's exchanges."""
    command = [sys.executable, *sys.argv, "--worker", method, "--out", str(folder)]
    single = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    codes = launch(command, args.hosts, testbed=hosts, env={**single, "POSEIDON_TIMEOUT": "120"})
    if any(codes):
        sys.exit(f"{args.adapter}, {method} failed: its message is above")
    found = [json.loads((folder / f"{method}-{rank}.json").read_text()) for rank in range(args.hosts)]
    return max(median(one["steps"]) for one in found), found[0]["stats"]


def save_trace(stats: Sequence[LayerSynchronization], path: str) -> None:
    """Rank 0's last step: its exchanges below the backward pass."""
    begin_ns, end_ns = stats[0].backward_begin_ns, stats[0].backward_end_ns
    spans = [Span("backward", 0, begin_ns, end_ns)]
    spans += [Span("synchronization", 0, one.started_ns, one.completed_ns, one.name) for one in stats]
    write_trace(Report("VGG19", "", [], [], [], [RankRecord(0, "host 0", 0, [], spans)]), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", choices=("jax", "tensorflow"))
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument(
        "--link", default="156.25mbit", help="rate of each port and direction; 10 GbE with a scale of 4"
    )
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--compute", type=float, default=3.6, help="seconds that a step sleeps")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--trace", help="write rank 0's last step here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return work(args)
    with tempfile.TemporaryDirectory() as folder, Testbed(args.hosts, args.link) as hosts:
        alone_s, _ = measured(args, "none", hosts, Path(folder))
        step_s, plain = measured(args, "poseidon", hosts, Path(folder))
    stats = [LayerSynchronization(**one) for one in plain]
    hidden = sum(one.completed_ns <= one.backward_end_ns for one in stats)
    sent = sum(one.bytes for one in stats)
    print(f"{args.adapter}: {args.hosts} hosts, {args.link}: {step_s:.3f} s a step, {alone_s:.3f} s without exchange")
    print(f"efficiency {alone_s / step_s:.3f} (bar {BAR}); {sent / 2**20:.1f} MiB sent and received by rank 0's worker")
    schemes = ", ".join(f"{len(list(of))} {name}" for name, of in itertools.groupby(sorted(s.scheme for s in stats)))
    print(f"{hidden} of {len(stats)} layers ({schemes}) were exchanged before the backward pass ended")
    if args.trace:
        save_trace(stats, args.trace)
    return None


if __name__ == "__main__":
    main()
