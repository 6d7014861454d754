"""Random JAX jobs: what a seed stands for, and its training on several workers beside one process that does all."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import poseidon.jax as poseidon
from random_jax_models import IN, OTHERS, PLAIN, Model, build
from waiting import compute_for

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.25),
    "momentum": lambda: optax.sgd(0.25, momentum=0.5, nesterov=True),
    "adam": lambda: optax.adam(0.02, eps=1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.02, eps=1e-2)),
    "lamb": lambda: optax.lamb(0.02, eps=1e-2),
    "multi": lambda: optax.MultiSteps(optax.sgd(0.25, momentum=0.5), 2),
    "plateau": lambda: optax.chain(optax.sgd(0.25), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.25),
    "rmsprop": lambda: optax.rmsprop(0.02, eps=1e-1),
    "finite": lambda: optax.apply_if_finite(optax.sgd(0.25), 2),
}
NEED_VALUES = ("plateau", "polyak")  # they decide by the loss
EXACT_OPTIMIZERS = ("sgd", "momentum", "multi")


@dataclass(frozen=True)
class Job:
    """One random job."""

    kind: str  # of model
    widths: tuple[int, ...]
    dtype: str  # mixed: float32 parameters in a bfloat16 network
    dense: tuple[bool, ...]
    tied: bool
    optimizer: str
    rows: int
    uneven: bool
    calls: int  # of value_and_grad in one step
    micro: int  # parts of a batch, over which the loss scans
    compiled: str  # jit, no, disabled, loss (that alone), ahead
    scan: bool  # all steps in one program
    donate: bool
    remat: bool
    aux: bool
    statistic: bool  # of the batches of all ranks, in the loss
    reduces: bool
    frozen: str  # one parameter: masked, stopped, outside, or only in the second step
    unused: bool
    second: bool  # another model in the same step
    reused: bool  # the batch's memory is filled again
    numpy_params: bool
    between: str
    steps: int


def make(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)
    kind = draw.choice([*PLAIN, "mlp", "exact", *OTHERS])
    exact = kind == "exact"
    count = draw.randint(1, 4)
    dtype = "float32"
    if kind in PLAIN and draw.random() < 0.4:
        dtype = draw.choice(["float64"] if exact else ["bfloat16", "float16", "float64", "mixed"])
    scan = draw.random() < 0.2
    eager = ["no", "disabled", "loss"] if kind in ("mlp", "exact", "embedding") else []
    compiled = "jit" if scan or draw.random() < 0.75 else draw.choice(["ahead", *eager])
    statistic = draw.random() < 0.15 and not exact
    optimizer = draw.choice(list(EXACT_OPTIMIZERS if exact else OPTIMIZERS))
    return Job(
        kind=kind,
        widths=tuple(draw.choice([1, 3, 8, 17, 40]) for _ in range(count)),
        dtype=dtype,
        dense=tuple(draw.random() < 0.5 for _ in range(count)),
        tied=draw.random() < 0.2,
        optimizer=optimizer,
        rows=draw.choice([2, 4, 6]),
        uneven=draw.random() < 0.3 and not exact,
        calls=draw.choice([1, 1, 1, 2, 3]),
        micro=draw.choice([1, 1, 1, 2]) if kind != "nnx" else 1,
        compiled=compiled,
        scan=scan,
        donate=draw.random() < 0.4,
        remat=draw.random() < 0.3,
        aux=draw.random() < 0.4 or kind == "nnx",
        statistic=statistic,
        reduces=draw.random() < 0.4 or optimizer in NEED_VALUES,
        frozen=draw.choice(["", "", "", "masked", "stopped", "outside", "" if scan else "second step"]),
        unused=draw.random() < 0.15,
        second=draw.random() < 0.2,
        reused=draw.random() < 0.4,
        numpy_params=draw.random() < 0.2,
        between=draw.choice(["", "", "scale", "broadcast", "restore", "barrier", "values", "look", "late"]),
        steps=draw.randint(2, 4),
    )


def options(seed: int) -> dict[str, Any]:
    """What init() gets. Few different ones, since each costs the workers a new meeting."""
    return random.Random(seed // 25).choice(
        [
            {},
            {"small_bytes": 0, "chunk_bytes": 256},
            {"small_bytes": 1 << 15, "replica_check": 1},
            {"scheme": "sfb", "replica_check": 1},
            {"scheme": "sharded_factors"},
            {"scheme": "ps", "transport": "tcp", "chunk_bytes": 1024},
            {"wire": "bf16"},
            {"server_cores": 0, "flows": 2},
            {"transport": "tcp", "coding": "on"},
        ]
    )


class Workers:
    """The job's training on its workers: each has its own batch."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def batches(self, step: int) -> Any:
        return [_batch(self.job, poseidon.rank(), step, call) for call in range(self.job.calls)]

    def value_and_grad(self, loss: Any, probe: Any, params: Any, rest: Any, fixed: Any, batch: Any) -> Any:
        """The mean over ranks of the loss, the state after forward, and the gradients."""
        job = self.job

        def own(params: Any, rest: Any, fixed: Any, batch: Any) -> Any:
            shift = poseidon.all_reduce(probe(params, fixed, batch)) if job.statistic else 0.0
            value, rest = loss(params, rest, fixed, batch, shift)
            return (value, rest) if job.aux else value

        found, grads = poseidon.value_and_grad(own, has_aux=job.aux)(params, rest, fixed, batch)
        value, rest = found if job.aux else (found, rest)
        return poseidon.all_reduce(value) if job.reduces else value, _mean_of_floats(rest, poseidon.all_reduce), grads

    def all_reduce(self, values: Sequence[Any], operation: Any) -> Any:
        """What the operation makes of one value of each rank."""
        return poseidon.all_reduce(values[poseidon.rank()], operation)


class Alone:
    """The same in one process, which has the batches of all ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def batches(self, step: int) -> Any:
        ranks = range(poseidon.world_size())
        return [[_batch(self.job, rank, step, call) for rank in ranks] for call in range(self.job.calls)]

    def value_and_grad(self, loss: Any, probe: Any, params: Any, rest: Any, fixed: Any, batches: Any) -> Any:
        def of_all(params: Any) -> Any:
            shift = sum(probe(params, fixed, one) for one in batches) / len(batches) if self.job.statistic else 0.0
            found = [loss(params, rest, fixed, one, shift) for one in batches]
            means = jax.tree.map(
                lambda *each: sum(each) / len(each) if _is_float(each[0]) else each[0], *[state for _, state in found]
            )
            return sum(value for value, _ in found) / len(found), means

        (value, rest), grads = jax.value_and_grad(of_all, has_aux=True)(params)
        return value, rest, grads

    def all_reduce(self, values: Sequence[Any], operation: str) -> Any:
        return getattr(jnp, operation)(jnp.stack(values), 0)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _mean_of_floats(tree: Any, mean: Callable[[Any], Any]) -> Any:
    leaves, form = jax.tree.flatten(tree)
    places = [at for at, leaf in enumerate(leaves) if _is_float(leaf)]
    for at, found in zip(places, mean([leaves[at] for at in places]) if places else [], strict=True):
        leaves[at] = found
    return jax.tree.unflatten(form, leaves)


def _batch(job: Job, rank: int, step: int, call: int) -> np.ndarray:
    draw = np.random.default_rng((job.steps, rank, step, call))
    shape = (job.rows + 2 * rank * job.uneven, IN)
    values = draw.integers(-2, 3, shape) if job.kind == "exact" else draw.normal(size=shape)
    return values.astype("float32" if job.dtype == "mixed" else jnp.dtype(job.dtype))


class Training:
    """The job, by its workers or alone."""

    def __init__(self, job: Job, side: Any) -> None:
        self.job, self.side = job, side
        dtype = "float32" if job.dtype == "mixed" else job.dtype
        self.model: Model = build(job.kind, job.widths, dtype, job.dense, job.tied)
        params = {"model": self.model.params}
        if job.unused:
            params["unused"] = jnp.ones(3, dtype)
        self.leaves, self.form = jax.tree.flatten(params)
        self.rest = self.model.rest
        self.second = jnp.asarray(np.linspace(-1, 1, IN * 2).reshape(IN, 2), dtype)
        self.fixed: list[int] = []  # leaves that are no parameters now
        self.buffers: dict[Any, np.ndarray] = {}
        self.seen: list[Any] = []
        self.begin([0] if job.frozen == "outside" else [])

    def begin(self, fixed: list[int]) -> None:
        """Trains without these leaves from now on."""
        job, self.fixed = self.job, fixed
        self.optimizer = optax.with_extra_args_support(OPTIMIZERS[job.optimizer]())
        if isinstance(self.optimizer, optax.MultiSteps):
            self.optimizer = self.optimizer.gradient_transformation()
        if job.frozen == "masked":
            kinds = ["trained"] * len(self.leaves)
            kinds[0] = "frozen"
            labels = jax.tree.unflatten(self.form, kinds)
            self.optimizer = optax.multi_transform({"trained": self.optimizer, "frozen": optax.set_to_zero()}, labels)
        self.state = self.optimizer.init(self.trained())
        self.second_state = optax.sgd(0.25).init(self.second)
        self.step = self._compile()

    def trained(self) -> Any:
        if self.fixed:
            return {str(at): leaf for at, leaf in enumerate(self.leaves) if at not in self.fixed}
        return jax.tree.unflatten(self.form, self.leaves)

    def whole(self, params: Any, fixed: Any) -> Any:
        """The model's own tree, of what is trained and what is not."""
        if fixed:
            every = {**params, **fixed}
            params = jax.tree.unflatten(self.form, [every[str(at)] for at in range(len(self.leaves))])
        if self.job.frozen == "stopped":
            leaves = jax.tree.leaves(params)
            params = jax.tree.unflatten(self.form, [jax.lax.stop_gradient(leaves[0]), *leaves[1:]])
        if self.job.dtype == "mixed":
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return params["model"]

    def probe(self, params: Any, fixed: Any, batch: Any) -> Any:
        first = jax.tree.leaves(self.whole(params, fixed))[0]  # which no `dense` has
        return jnp.mean(batch.astype(jnp.float32)) * jnp.mean(first.astype(jnp.float32))

    def loss(self, params: Any, rest: Any, fixed: Any, batch: Any, shift: Any) -> Any:
        def part(rest: Any, rows: Any) -> Any:
            outputs, rest = self.model.forward(self.whole(params, fixed), rest, rows)
            outputs = outputs.astype(jnp.float64 if self.job.dtype == "float64" else jnp.float32)
            if self.job.kind == "exact":
                return outputs.sum(), rest
            return jnp.mean((outputs - 1 + shift) ** 2), rest

        batch = batch.astype(jnp.bfloat16) if self.job.dtype == "mixed" else batch
        if self.job.micro == 1:
            return part(rest, batch)
        rows = batch.reshape(self.job.micro, -1, IN)
        rest, values = jax.lax.scan(lambda state, one: part(state, one)[::-1], rest, rows)
        return values.mean(), rest

    def _one_step(self, carried: Any, batches: Any) -> Any:
        job, (params, rest, state, second, second_state, fixed) = self.job, carried
        loss = jax.checkpoint(self.loss) if job.remat else self.loss
        loss = jax.jit(loss) if job.compiled == "loss" else loss
        total, value = None, jnp.float32(0)
        for batch in batches:
            value, rest, grads = self.side.value_and_grad(loss, self.probe, params, rest, fixed, batch)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        if job.second:

            def other(second: Any, rest: Any, fixed: Any, batch: Any, shift: Any) -> Any:
                return jnp.mean((batch @ second + shift) ** 2).astype(jnp.float32), rest

            def probe(second: Any, fixed: Any, batch: Any) -> Any:
                return jnp.mean(second)

            grads = self.side.value_and_grad(other, probe, second, {}, {}, batches[0])[2]
            updates, second_state = optax.sgd(0.25).update(grads, second_state, second)
            second = optax.apply_updates(second, updates)
        more = {"value": value} if job.optimizer in NEED_VALUES else {}
        updates, state = self.optimizer.update(total, state, params, **more)
        return optax.apply_updates(params, updates), rest, state, second, second_state, fixed

    def _compile(self) -> Any:
        if self.job.compiled in ("jit", "ahead"):
            return jax.jit(self._one_step, donate_argnums=(0,) if self.job.donate else ())
        return self._one_step

    def carried(self) -> Any:
        fixed = {str(at): self.leaves[at] for at in self.fixed}
        carried = (self.trained(), self.rest, self.state, self.second, self.second_state, fixed)
        # What is donated is nobody else's: the leaves of a model are those of another training, too.
        return jax.tree.map(jnp.array, carried) if self.job.donate else carried

    def take(self, carried: Any) -> None:
        params, self.rest, self.state, self.second, self.second_state, fixed = carried
        if self.fixed:
            every = {**params, **fixed}
            self.leaves = [every[str(at)] for at in range(len(self.leaves))]
        else:
            self.leaves = jax.tree.leaves(params)

    def train(self) -> None:
        job = self.job
        if job.scan:
            steps = [self.side.batches(step) for step in range(job.steps)]
            together = jax.tree.map(lambda *each: jnp.stack(each), *steps)
            whole = jax.jit(
                lambda carried: jax.lax.scan(lambda one, rows: (self._one_step(one, rows), None), carried, together)[0]
            )
            self.take(whole(self.carried()))
            return
        for step in range(job.steps):
            if job.frozen == "second step" and step in (1, 2):
                self.begin([0] if step == 1 else [])
            self.one_step(step)
            self.between(step)

    def one_step(self, step: int) -> None:
        carried, batches = self.carried(), self.given(self.side.batches(step))
        if self.job.numpy_params and step == 0:
            carried = (jax.tree.map(np.array, carried[0]), *carried[1:])
        if self.job.compiled == "ahead":
            self.step = self._compile().lower(carried, batches).compile()
        found = self.step(carried, batches)
        if self.buffers or self.job.numpy_params:
            jax.block_until_ready(found)  # JAX itself reads NumPy's memory until then
        for buffer in self.buffers.values():
            buffer.fill(100)
        if self.job.numpy_params and step == 0 and self.job.compiled == "jit":
            jax.tree.map(lambda leaf: leaf.fill(100), carried[0])
        self.take(found)

    def given(self, batches: Any) -> Any:
        """The batches, in memory that is filled again if the job does so."""
        if not self.job.reused or self.job.compiled != "jit":
            return batches
        for path, leaf in jax.tree_util.tree_flatten_with_path(batches)[0]:
            self.buffers.setdefault(str(path), leaf.copy())[...] = leaf
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self.buffers[str(path)], batches)

    def results(self) -> list[np.ndarray]:
        """What must be equal on all ranks, and the same in one process but for rounding."""
        leaves = jax.tree.leaves([self.leaves, self.second, self.seen, self.rest])
        return [np.asarray(leaf, "float64") for leaf in leaves if not _is_key(leaf)]

    def between(self, step: int) -> None:
        what, alone = self.job.between, isinstance(self.side, Alone)
        if what == "scale":
            self.leaves = [(leaf * 0.5).astype(leaf.dtype) for leaf in self.leaves]
        elif what == "values":
            values = [jnp.asarray([rank + step, -rank, 3], jnp.int32) for rank in range(poseidon.world_size())]
            self.seen += [self.side.all_reduce(values, one) for one in ("sum", "min", "max", "mean")]
        elif what == "look":
            self.seen.append(sum(float(leaf.astype(jnp.float32).sum()) for leaf in self.leaves) * 0)
        elif alone:
            return
        elif what == "broadcast":
            self.leaves = poseidon.broadcast(self.leaves)
        elif what == "restore":
            mine = self.leaves if poseidon.rank() == 0 else [leaf + 1 for leaf in self.leaves]
            self.leaves = poseidon.broadcast(mine)
        elif what == "barrier":
            poseidon.barrier()
        elif what == "late" and poseidon.rank() == step % poseidon.world_size():
            compute_for(0.005)


def tolerance(job: Job, given: dict[str, Any]) -> float:
    """How far from one process's parameters those of the workers may be: 0 where all sums are exact.

    Otherwise sums are made in another order, and types of 16 bits round each step's gradients and parameters.
    """
    if job.kind == "exact" and poseidon.world_size() == 2 and not job.second:
        return 0.0
    limits = {"float64": 1e-4, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2, "mixed": 2e-2}
    return max(limits[job.dtype], 1e-2 if "wire" in given else 0.0)


def run_job(seed: int) -> str:
    """Collective: trains the job of a seed, and compares rank 0's with one process. Returns a digest, equal on all."""
    job = make(seed)
    with ExitStack() as stack:
        if job.dtype == "float64":
            stack.enter_context(jax.enable_x64(True))
        if job.compiled == "disabled":
            stack.enter_context(jax.disable_jit())
        mine = Training(job, Workers(job))
        mine.train()
        ours = mine.results()
        if poseidon.rank() == 0:
            reference = Training(job, Alone(job))
            reference.train()
            limit = tolerance(job, options(seed))
            for found, wanted in zip(ours, reference.results(), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)
    if seed % 5 == 0:
        jax.clear_caches()
    return hashlib.blake2b(b"".join(one.tobytes() for one in ours), digest_size=8).hexdigest()
