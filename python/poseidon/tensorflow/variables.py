"""Trainable variables as layers of the client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from poseidon.adapter.layer import SchemeChoice, SyncedLayer, WireChoice
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.wishes import Wishes
from poseidon.errors import InvalidArgument
from poseidon.options import BY_NAME, Settings
from poseidon.schemes import SCHEME_CHOICES
from poseidon.tensorflow.plugin import plugin

_DTYPES = ("float32", "float64", "float16", "bfloat16")


class SyncedVariable(SyncedLayer):
    """One trainable variable. `factors`: its gradients are products of two matrices in the graph of this rank."""

    def __init__(
        self, name: str, variable: Any, wishes: LayerWishes, rules: LayerRules, factors: tuple[Any, Any] | None
    ) -> None:
        """Raises InvalidArgument, naming the variable, if it cannot do what is wished."""
        shape = tuple(variable.shape)
        self.variable = variable
        facts = LayerFacts(
            name,
            tf.as_dtype(variable.dtype).name,
            math.prod(shape),
            shape[0] if len(shape) > 1 else 0,
            gives_factors=factors is not None,
            who=f"variable {name}",
        )
        super().__init__(facts, wishes, rules, shape, factors is not None)
        if factors is not None:
            self.count_forward_rows(factors[0].shape[0] or 0)

    @property
    def counts_factors(self) -> bool:
        """Whether its exchanges tell how many factors their gradients have, which is then known for the next ones."""
        return self.factorable and not self.terms.grouped


def name_of(variable: Any) -> str:
    """A variable's name, as Keras has it: with the layers that it lies in."""
    return str(getattr(variable, "path", None) or variable.name)


def factors_of(gradient: Any) -> tuple[Any, Any] | None:
    """The matrices of which a gradient is the product transpose(left) x right, as that of a `Dense` kernel is.

    None for any other gradient, outside of a graph, and without a compiler (plugin.py).
    """
    if not tf.is_symbolic_tensor(gradient) or gradient.dtype != tf.float32 or plugin() is None:
        return None
    operation = gradient.op
    if operation.type != "MatMul" or not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return None
    left, right = operation.inputs
    return left, right


def collect_variables(
    variables: Sequence[Any],
    gradients: Sequence[Any],
    scheme: SchemeChoice | None,
    wire: WireChoice | None,
    settings: Settings,
) -> list[SyncedVariable]:
    """The variables as layers, in the order in which backward finishes them.

    Raises InvalidArgument naming the variable that cannot be synchronized.
    """
    schemes = Wishes("scheme", SCHEME_CHOICES, _with_dots(scheme), settings.scheme)
    formats = Wishes("wire format", BY_NAME["wire"].choices, _with_dots(wire), settings.wire)
    rules = LayerRules.of(settings)
    layers: list[SyncedVariable] = []
    for name, variable, gradient in zip(_unique_names(variables), variables, gradients, strict=True):
        names = [name.replace("/", ".")]
        dtype = tf.as_dtype(variable.dtype).name
        if dtype not in _DTYPES:
            raise InvalidArgument(
                f"variable {name} has dtype {dtype}, which cannot be synchronized (only {', '.join(_DTYPES)} can): "
                "convert it, or make it not trainable"
            )
        wishes = LayerWishes(schemes.of(names), formats.of(names), **LayerWishes.for_all(settings))
        layers.append(SyncedVariable(name, variable, wishes, rules, factors_of(gradient)))
    schemes.check_used()
    formats.check_used()
    return layers[::-1]


def _unique_names(variables: Sequence[Any]) -> list[str]:
    """The variables' names, with a number after those that came before: TensorFlow calls all "Variable:0" by itself."""
    counts: dict[str, int] = {}
    names = []
    for name in map(name_of, variables):
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def _with_dots(wish: SchemeChoice | None) -> SchemeChoice | None:
    """Patterns with a dot where Keras has a slash."""
    if wish is None or isinstance(wish, str):
        return wish
    return {pattern.replace("/", "."): value for pattern, value in wish.items()}
