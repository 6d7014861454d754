"""Turns: what takes turns runs in the order of the program, on all ranks alike, whatever order XLA would choose.

JAX passes a token through the calls of an ordered effect: inside a program, through its loops, branches and inner
programs, and from one program to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from poseidon.errors import PoseidonError

try:
    from jax._src import effects  # jax.extend has no effects yet
    from jax._src.dispatch import runtime_tokens

    _NEEDED = (
        effects.Effect,
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
    )
except (ImportError, AttributeError) as error:
    raise PoseidonError(
        f"JAX {jax.__version__} keeps its effects elsewhere than Poseidon looks for them ({error}): use a version of "
        "JAX that docs/compatibility.md names"
    ) from error


@dataclass(frozen=True)
class _Turns(effects.Effect):
    """The order of one port: one that failed in an earlier job holds nobody up."""

    port: int

    def __repr__(self) -> str:  # JAX says which effects it does not support
        return "those of poseidon.jax, which exchanges the gradients of one device in each process"


_take_turn = Primitive("poseidon_turn")


def take_turn(value: Any, port: int) -> Any:
    """The same float32, once everything has run that took a turn before. What takes its turn next waits for it."""
    return _take_turn.bind(value, port=port)


def wait_for_turns(port: int) -> None:
    """Returns when everything has run that took a turn of this port. Raises JaxRuntimeError if some of it failed."""
    jax.block_until_ready(_compiled(port)(jnp.float32(0)))


def forget_turns(port: int) -> None:
    """The port is closed. Otherwise JAX tells its failure when the process ends, though the job has survived it."""
    for tokens in (runtime_tokens.current_tokens, runtime_tokens.output_runtime_tokens):
        tokens.pop(_Turns(port), None)


def call_plugin(
    target: str,
    given: Sequence[Any],
    kind: jax.ShapeDtypeStruct,
    port: int,
    layer: int,
    divisor: int | None = None,
    aliases: Mapping[int, int] | None = None,
) -> tuple[Any, Any]:
    """What a handler of the plugin makes of a layer: an array of this kind, and a zero that depends on it."""
    kinds = (kind, jax.ShapeDtypeStruct((), jnp.float32))
    call = jax.ffi.ffi_call(target, kinds, has_side_effect=True, input_output_aliases=dict(aliases or {}))
    more = {} if divisor is None else {"divisor": np.int64(divisor)}
    found, zero = call(*given, port=np.int64(port), layer=np.int64(layer), **more)
    return found, zero


@_take_turn.def_effectful_abstract_eval
def _result(value: Any, port: int) -> tuple[Any, set[_Turns]]:
    return value, {_Turns(port)}


@_take_turn.def_impl
def _run(value: Any, port: int) -> Any:
    with jax.disable_jit(False):  # in a program that has disabled it jit would come here again
        return _compiled(port)(value)


@lru_cache(maxsize=64)
def _compiled(port: int) -> Callable[[Any], Any]:
    return jax.jit(partial(take_turn, port=port))


def _lower(context: Any, value: Any, *, port: int) -> list[Any]:
    token = context.tokens_in.get(_Turns(port))
    call = jax.ffi.ffi_lowering(
        "poseidon_turn",
        skip_ffi_layout_processing=True,
        has_side_effect=True,
        result_types=[value.type, token.type],
    )
    same, next_token = call(context, value, token, port=np.int64(port))
    context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({_Turns(port): next_token})))
    return [same]


mlir.register_lowering(_take_turn, _lower, platform="cpu")
for kinds in _NEEDED[1:]:
    kinds.add_type(_Turns)
