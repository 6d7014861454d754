"""`value_and_grad`: jax.value_and_grad whose gradients are the means over all ranks.

Each parameter passes through an identity whose backward pushes the gradient and returns at once. Every push also gives
a token, and autodiff adds the tokens up. Each pull depends on that sum, so no rank waits for a result before it has
pushed everything: whatever order XLA chooses, ranks cannot wait for each other in a circle.

A call pushes when all pulls of the call before it in the program are done, so that ranks never mix two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.adapter.agreement import check_same
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_table import LayerTable
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument
from poseidon.jax.process import context, port
from poseidon.jax.turns import take_turn

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_tables: WeakKeyDictionary[Membership, dict[str, list[SyncedLayer]]] = WeakKeyDictionary()


def value_and_grad(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Like jax.value_and_grad for the first argument, a tree of parameters. Gradients are means over all ranks.

    The value stays this rank's own. Use it inside jit, scan and remat, or without. All ranks must use it on the same
    parameters in the same order. The first call for a tree of new shapes waits for all ranks. Raises Mismatch if they
    differ. If the job fails, JAX raises a JaxRuntimeError with the reason, and `failure()` returns the PoseidonError.
    """

    def local_and_mean(params: Any, *arguments: Any, **keywords: Any) -> Any:
        here = context()
        if here.client is None:
            return jax.value_and_grad(function, has_aux=has_aux)(params, *arguments, **keywords)
        leaves, form = jax.tree_util.tree_flatten(params)
        layers = _layers_of(here, params)
        exchange = _Exchange(port())

        def tagged(leaves: Sequence[Any], token: Any) -> Any:
            sent = [exchange.tag(leaf, token, one.layer) for leaf, one in zip(leaves, layers, strict=True)]
            return function(jax.tree_util.tree_unflatten(form, sent), *arguments, **keywords)

        value, (grads, token) = jax.value_and_grad(tagged, argnums=(0, 1), has_aux=has_aux)(leaves, jnp.float32(0))
        means = exchange.means(grads, token, [one.layer for one in layers])
        return value, jax.tree_util.tree_unflatten(form, means)

    return local_and_mean


def _layers_of(here: Membership, params: Any) -> list[SyncedLayer]:
    """The layers of these parameters. Collective for a tree of shapes that is new."""
    assert here.client is not None
    assert here.control is not None
    layers = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name, dtype, shape = jax.tree_util.keystr(path) or "params", jnp.result_type(leaf).name, jnp.shape(leaf)
        if dtype not in _DTYPES:
            raise InvalidArgument(f"parameter {name} is {dtype}, and a mean is made of {', '.join(_DTYPES)} only")
        wire = here.settings.wire if dtype == "float32" else "fp32"
        size = int(np.prod(shape))
        layers.append(SyncedLayer(name, shape, dtype, size, "ps", wire, factorable=False, fully_connected=False))
    description = "\n".join(f"{one.name}: {one.dtype} {one.shape}" for one in layers)
    tables = _tables.setdefault(here, {})
    if description not in tables:
        check_same(here.control, description, "model")
        LayerTable(layers[::-1]).connect(here.client, here.control)  # as backward finishes them
        tables[description] = layers
    return tables[description]


class _Exchange:
    """The exchange of one call of `value_and_grad`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._begin = take_turn(jnp.float32(0), port)
        self._pushed: set[int] = set()

    def tag(self, leaf: Any, token: Any, layer: int) -> Any:
        """The same parameter, whose gradient is pushed by backward."""

        @jax.custom_vjp
        def identity(leaf: Any, token: Any, begin: Any) -> Any:
            return leaf

        def forward(leaf: Any, token: Any, begin: Any) -> tuple[Any, Any]:
            return leaf, begin

        def backward(begin: Any, grad: Any) -> tuple[Any, Any, None]:
            return *self._push(grad, begin, layer), None

        identity.defvjp(forward, backward)
        return identity(leaf, token, self._begin)

    def means(self, grads: Sequence[Any], token: Any, layers: Sequence[int]) -> list[Any]:
        """The means of these gradients. `token`: what their pushes have given."""
        own = list(grads)
        for index, layer in enumerate(layers):
            if layer not in self._pushed:  # the loss does not use it, so that its gradient is zeros
                own[index], sent = self._push(own[index], self._begin, layer)
                token += sent
        means, end = [], token
        for grad, layer in zip(own, layers, strict=True):
            mean, done = self._call("poseidon_pull", grad, token, layer)
            means.append(mean)
            end += done
        take_turn(end, self._port)
        return means

    def _push(self, grad: Any, begin: Any, layer: int) -> tuple[Any, Any]:
        self._pushed.add(layer)
        return self._call("poseidon_push", grad, begin, layer)

    def _call(self, target: str, grad: Any, after: Any, layer: int) -> tuple[Any, Any]:
        """An array in the gradient's place, and a zero that depends on it, after `after`."""
        kinds = (jax.ShapeDtypeStruct(grad.shape, grad.dtype), jax.ShapeDtypeStruct((), jnp.float32))
        call = jax.ffi.ffi_call(target, kinds, has_side_effect=True, input_output_aliases={0: 0})
        found, zero = call(grad, after, port=np.int64(self._port), layer=np.int64(layer))
        return found, zero
