"""Turns: what takes turns runs in the order of the program, on all ranks alike, whatever order XLA would choose.

JAX passes a token through the calls of an ordered effect: inside a program, through its loops, branches and inner
programs, and from one program to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from poseidon.errors import PoseidonError

try:
    from jax._src import effects  # jax.extend has no effects yet

    _EFFECT = effects.Effect
    _KINDS = (effects.lowerable_effects, effects.ordered_effects, effects.control_flow_allowed_effects)
except (ImportError, AttributeError) as error:
    raise PoseidonError(
        f"JAX {jax.__version__} keeps its effects elsewhere than Poseidon looks for them ({error}): use a version of "
        "JAX that docs/compatibility.md names"
    ) from error


@dataclass(frozen=True)
class _Turns(_EFFECT):
    """The order of one port: one that failed in an earlier job holds nobody up."""

    port: int

    def __repr__(self) -> str:  # JAX says which effects it does not support
        return "those of poseidon.jax, which exchanges the gradients of one device in each process"


_take_turn = Primitive("poseidon_turn")


def take_turn(value: Any, port: int) -> Any:
    """The same float32, once everything has run that took a turn before. What takes its turn next waits for it."""
    return _take_turn.bind(value, port=port)


@_take_turn.def_effectful_abstract_eval
def _result(value: Any, port: int) -> tuple[Any, set[_Turns]]:
    return value, {_Turns(port)}


@_take_turn.def_impl
def _run(value: Any, port: int) -> Any:
    return jax.jit(partial(take_turn, port=port))(value)


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
for kinds in _KINDS:
    kinds.add_type(_Turns)
