"""`value_and_grad`: jax.value_and_grad whose gradients are the means over all ranks.

Each parameter passes through an identity whose backward pushes the gradient and returns at once. Every push also gives
a token, and autodiff adds the tokens up. Each pull depends on that sum, so no rank waits for a result before it has
pushed everything: whatever order XLA chooses, ranks cannot wait for each other in a circle.

A kernel that `dense` has multiplied with is pushed as factors, where these are less (dense.py).

A call pushes when all pulls of the call before it in the program are done, so that ranks never mix two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.adapter.agreement import check_same
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.layer_table import LayerTable
from poseidon.adapter.membership import Membership
from poseidon.adapter.native_look import NativeLook
from poseidon.adapter.plan_table import PlanTable, make_plan_table
from poseidon.adapter.stats import LayerSynchronization, latest_synchronization
from poseidon.adapter.step_watch import watch_steps
from poseidon.errors import InvalidArgument
from poseidon.jax.dense import Kernel, tracing
from poseidon.jax.process import connection, context, port
from poseidon.jax.turns import call_plugin, take_turn
from poseidon.options import Settings
from poseidon.schemes import takes_factors

_DTYPES = ("float32", "float64", "float16", "bfloat16")


def value_and_grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Like jax.value_and_grad for the first argument, a tree of parameters. Gradients are means over all ranks.

    The value stays this rank's own. Use it inside jit, scan and remat, or without. All ranks must use it on the same
    parameters in the same order. The first call for a tree of new shapes waits for all ranks. Raises Mismatch if they
    differ. If the job fails, JAX raises a JaxRuntimeError with the reason, and `failure()` returns the PoseidonError.
    """

    def local_and_mean(params: Any, *arguments: Any, **keywords: Any) -> Any:
        here = context()
        here.check_met("value_and_grad")
        if here.client is None:
            return jax.value_and_grad(function, has_aux=has_aux)(params, *arguments, **keywords)
        leaves, form = jax.tree_util.tree_flatten(params)
        _check_parameters(params)
        exchange = _Exchange(port(), here.world_size)

        def tagged(leaves: Sequence[Any], token: Any) -> Any:
            kernels = exchange.tag(leaves, token)
            given = jax.tree_util.tree_unflatten(form, [kernel.tagged for kernel in kernels])
            before = _held_by_objects(given)
            with tracing(kernels, token):
                answer = function(given, *arguments, **keywords)
            _check_unchanged(before, _held_by_objects(given))
            # Forward is traced, and so it is known what has factors. Backward, which pushes, is not traced yet.
            exchange.layers = _layers_of(here, params, kernels)
            return answer

        value, (grads, token) = jax.value_and_grad(tagged, argnums=(0, 1), has_aux=has_aux)(leaves, jnp.float32(0))
        if leaves:
            token += exchange.look(leaves, _look_of(here, exchange.layers))
        return value, jax.tree_util.tree_unflatten(form, exchange.means(grads, token))

    return local_and_mean


def plan() -> PlanTable:
    """The scheme and the bytes of each parameter of the latest `value_and_grad` that was traced for new shapes.

    It is empty with one worker. Raises InvalidArgument before one was traced.
    """
    here = context()
    return PlanTable() if here.client is None else make_plan_table(_latest_layers("plan()"), here)


def synchronization_stats() -> list[LayerSynchronization]:
    """When each parameter of `plan()` was exchanged last, by which scheme, and its bytes, as backward has pushed them.

    It is empty with one worker. Wait for the step's results first. Raises InvalidArgument before one was traced.
    """
    here = context()
    if here.client is None:
        return []
    return latest_synchronization(_latest_layers("synchronization_stats()"), here.client)


def _latest_layers(what: str) -> list[SyncedLayer]:
    tables = list(connection().tables.values())
    if not tables:
        raise InvalidArgument(f"{what} before the first step: call it when value_and_grad has been traced")
    return tables[-1]


def _layers_of(here: Membership, params: Any, kernels: Sequence[Kernel]) -> list[SyncedLayer]:
    """The layers of these parameters. Collective for a tree of shapes, and of kernels with factors, that is new."""
    rules = LayerRules.of(here.settings)
    layers = [
        _layer(here.settings, rules, jax.tree_util.keystr(path) or "params", leaf, kernel)
        for (path, leaf), kernel in zip(jax.tree_util.tree_flatten_with_path(params)[0], kernels, strict=True)
    ]
    description = "\n".join(f"{one.name}: {one.dtype} {one.shape}{' dense' * one.factorable}" for one in layers)
    tables = connection().tables
    if description not in tables:
        check_same(here.present_control, description, "model")
        table = LayerTable(layers[::-1])  # as backward finishes them
        if any(layer.factorable for layer in layers):
            table.settle(here.present_control, here.present_client.cluster)
        table.connect(here.present_client, here.present_control)
        for layer in layers:
            layer.take_next_scheme(here.present_client)
        tables[description] = layers
        watch_steps(here, layers, "jax")
    return tables[description]


def _check_parameters(params: Any) -> None:
    """Raises InvalidArgument for a leaf that has no mean: a counter, a random key, or no array at all."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        dtype = getattr(leaf, "dtype", None) or (np.dtype(type(leaf)) if isinstance(leaf, (float, int)) else None)
        if dtype is None or dtype.name not in _DTYPES:
            raise InvalidArgument(
                f"parameter {jax.tree_util.keystr(path) or 'params'} is {dtype or type(leaf).__name__}, and a mean is "
                f"made of {', '.join(_DTYPES)} only: pass what is trained as the first argument, and the rest as "
                "another one (nnx.split(model, nnx.Param, ...), eqx.partition(model, eqx.is_inexact_array))"
            )


def _held_by_objects(tree: Any) -> dict[str, Any]:
    """The leaves that lie in objects, such as modules of Flax NNX, which a function can change in place."""
    nodes = jax.tree_util.tree_flatten(tree, is_leaf=lambda node: not isinstance(node, (dict, list, tuple)))[0]
    found = [jax.tree_util.tree_flatten_with_path(node)[0] for node in nodes if not isinstance(node, jax.Array)]
    return {f"{index}{jax.tree_util.keystr(path)}": leaf for index, one in enumerate(found) for path, leaf in one}


def _check_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = [name.lstrip("0123456789") for name, leaf in before.items() if after.get(name) is not leaf]
    if changed:
        raise InvalidArgument(
            f"the function has changed {changed[0]} of its parameters, such as a statistic of BatchNorm, and JAX would "
            "lose that: split the model (nnx.split(model, nnx.Param, ...)), and return the changed state as an aux "
            "value, as docs/jax.md#flax-nnx-and-equinox does"
        )


def _look_of(here: Membership, layers: Sequence[SyncedLayer]) -> NativeLook:
    """What compares the ranks' parameters of these layers. Collective for new layers."""
    looks = connection().looks
    if layers[0].layer not in looks:
        looks[layers[0].layer] = NativeLook(here, layers, jnp.dtype, f"jax {jax.__version__}")
    return looks[layers[0].layer]


def _layer(settings: Settings, rules: LayerRules, name: str, leaf: Any, kernel: Kernel) -> SyncedLayer:
    shape, rows = jnp.shape(leaf), kernel.row_counts if kernel.has_factors else []
    facts = LayerFacts(
        name,
        jnp.result_type(leaf).name,
        int(np.prod(shape)),
        shape[0] if rows else 0,
        gives_factors=bool(rows),
        who=f"parameter {name}",
    )
    wishes = LayerWishes(
        settings.scheme, settings.wire, wire_if_float=True, settles=True, **LayerWishes.for_all(settings)
    )
    layer = SyncedLayer(facts, wishes, rules, shape, bool(rows))
    for count in rows:
        layer.count_forward_rows(count)
    return layer


class _Exchange:
    """The exchange of one call of `value_and_grad`. `layers`: of its parameters; given before backward is traced."""

    layers: Sequence[SyncedLayer]

    def __init__(self, port: int, divisor: int) -> None:
        self._port, self._divisor = port, divisor
        self._begin = take_turn(jnp.float32(0), port)
        self._pushed: set[int] = set()

    def tag(self, leaves: Sequence[Any], token: Any) -> list[Kernel]:
        """The same parameters, whose gradients are pushed by backward."""
        return [
            Kernel(self._tagged(leaf, token, index), leaf, partial(self._push_product, index))
            for index, leaf in enumerate(leaves)
        ]

    def _tagged(self, leaf: Any, token: Any, index: int) -> Any:
        @jax.custom_vjp
        def identity(leaf: Any, token: Any, begin: Any) -> Any:
            return leaf

        def forward(leaf: Any, token: Any, begin: Any) -> tuple[Any, Any]:
            return leaf, begin

        def backward(begin: Any, grad: Any) -> tuple[Any, Any, None]:
            return *self._push(grad, begin, index), None

        identity.defvjp(forward, backward)
        return identity(leaf, token, self._begin)

    def look(self, leaves: Sequence[Any], look: NativeLook) -> Any:
        """A zero that depends on a look at the parameters with which the call begins."""
        if not look.number:
            return jnp.float32(0)
        arrays = [jnp.asarray(jax.lax.stop_gradient(leaf)) for leaf in leaves]
        call = jax.ffi.ffi_call("poseidon_look", jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        return call(self._begin, *arrays, port=np.int64(self._port), look=np.int64(look.number))

    def means(self, grads: Sequence[Any], token: Any) -> list[Any]:
        """The means of these gradients. `token`: what their pushes have given."""
        own = list(grads)
        for index, layer in enumerate(self.layers):
            if index in self._pushed:
                continue
            if takes_factors(layer.next_scheme):  # the loss does not use it
                rows, columns = layer.shape
                own[index], sent = self._push_product(index, jnp.zeros((0, rows)), jnp.zeros((0, columns)))
            else:  # the same, with zeros, or several products have given a part each
                own[index], sent = self._push(own[index], self._begin, index)
            token += sent
        means, end = [], token
        for grad, layer in zip(own, self.layers, strict=True):
            mean, done = self._call("poseidon_pull", grad, token, layer, aliases={0: 0})
            means.append(mean)
            end += done
        take_turn(end, self._port)
        return means

    def _push(self, grad: Any, begin: Any, index: int) -> tuple[Any, Any]:
        self._note_push(index)
        return self._call("poseidon_push", grad, begin, self.layers[index], aliases={0: 0})

    def _push_product(self, index: int, left: Any, right: Any) -> tuple[Any, Any]:
        """Pushes the gradient transpose(left) x right."""
        layer = self.layers[index]
        if not takes_factors(layer.next_scheme):
            return self._push(left.T @ right, self._begin, index)
        self._note_push(index)
        return self._call("poseidon_push_factors", left, right, self._begin, layer)

    def _note_push(self, index: int) -> None:
        if index in self._pushed:
            raise InvalidArgument(
                f"parameter {self.layers[index].name} is the kernel of poseidon.jax.dense and is used elsewhere, too: "
                "write inputs @ kernel in the place of dense"
            )
        self._pushed.add(index)

    def _call(self, target: str, *given: Any, aliases: dict[int, int] | None = None) -> tuple[Any, Any]:
        """An array of the gradient's kind, and a zero that depends on it. The last of what is given is the layer."""
        *arrays, layer = given
        kind = jax.ShapeDtypeStruct(layer.shape, layer.dtype)
        divisor = self._divisor if target != "poseidon_pull" else None
        return call_plugin(target, arrays, kind, self._port, layer.layer, divisor, aliases)
