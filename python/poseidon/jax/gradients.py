"""`value_and_grad`: jax.value_and_grad whose gradients are the means over all ranks.

Each parameter passes through an identity whose backward pushes the gradient and returns at once. Every push also gives
a token, and autodiff adds the tokens up. Each pull depends on that sum, so no rank waits for a result before it has
pushed everything: whatever order XLA chooses, ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from poseidon.adapter.agreement import check_same
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_table import LayerTable
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument
from poseidon.jax.process import context, port

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_Tables = dict[tuple[str, int], list[SyncedLayer]]
_tables: WeakKeyDictionary[Membership, _Tables] = WeakKeyDictionary()


class _Trace:
    """Numbers the calls of one trace.

    XLA may run two calls of one compiled program in any order, and ranks in different ones. So each has layers of its
    own. Without a trace calls run in the order of the program.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._count = 0

    def next_number(self, leaves: Sequence[Any]) -> int:
        """How many calls of the present trace came before this one."""
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return 0
        state = get_opaque_trace_state()
        self._count = self._count + 1 if state == self._state else 0
        self._state = state
        return self._count


_trace = _Trace()


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
        layers = _layers_of(here, params, _trace.next_number(leaves))

        def tagged(leaves: Sequence[Any], token: Any) -> Any:
            sent = [_tag(leaf, token, port(), one.layer) for leaf, one in zip(leaves, layers, strict=True)]
            return function(jax.tree_util.tree_unflatten(form, sent), *arguments, **keywords)

        value, (grads, token) = jax.value_and_grad(tagged, argnums=(0, 1), has_aux=has_aux)(leaves, jnp.float32(0))
        means = [_pull(grad, token, port(), one.layer) for grad, one in zip(grads, layers, strict=True)]
        return value, jax.tree_util.tree_unflatten(form, means)

    return local_and_mean


def _layers_of(here: Membership, params: Any, number: int) -> list[SyncedLayer]:
    """The layers of these parameters in the call of this number. Collective for shapes and numbers that are new."""
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
    key = description, number
    if key not in tables:
        check_same(here.control, f"{description}\ncall {number} of a trace", "model")
        LayerTable(layers[::-1]).connect(here.client, here.control)  # as backward finishes them
        tables[key] = layers
    return tables[key]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _tag(leaf: Any, token: Any, port: int, layer: int) -> Any:
    return leaf


def _tag_forward(leaf: Any, token: Any, port: int, layer: int) -> tuple[Any, None]:
    return leaf, None


def _push(port: int, layer: int, _: None, grad: Any) -> tuple[Any, Any]:
    kinds = (jax.ShapeDtypeStruct(grad.shape, grad.dtype), jax.ShapeDtypeStruct((), jnp.float32))
    call = jax.ffi.ffi_call("poseidon_push", kinds, has_side_effect=True, input_output_aliases={0: 0})
    same, token = call(grad, jnp.float32(0), port=np.int64(port), layer=np.int64(layer))
    return same, token


_tag.defvjp(_tag_forward, _push)


def _pull(grad: Any, token: Any, port: int, layer: int) -> Any:
    kind = jax.ShapeDtypeStruct(grad.shape, grad.dtype)
    call = jax.ffi.ffi_call("poseidon_pull", kind, has_side_effect=True, input_output_aliases={0: 0})
    return call(grad, token, port=np.int64(port), layer=np.int64(layer))
