"""`dense`: a product with a kernel whose gradient can travel as its factors.

`value_and_grad` hands its function the parameters as tracers, and keeps a note of which is which. `dense` looks its
kernel up there. It knows the kernel only where the program gives it as it is, and at the level of the function: inside
of a scan, a checkpoint, a vmap or another jit the gradient of one call is not that of the step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.extend.core import get_opaque_trace_state as _trace_state
except ImportError:  # before it was moved there
    from jax.core import get_opaque_trace_state as _trace_state


@dataclass
class Kernel:
    """A parameter while a function is traced. `tagged` is what the function gets, in the place of `own`.

    `push` takes the two factors of its gradient and returns a placeholder of the gradient, and a token. `row_counts`
    has the rows of the inputs of each `dense` that has used it.
    """

    tagged: Any
    own: Any
    push: Callable[[Any, Any], tuple[Any, Any]]
    row_counts: list[int] = field(default_factory=list)

    @property
    def has_factors(self) -> bool:
        """Whether its gradient is the product of one pair of factors."""
        return len(self.row_counts) == 1


@dataclass(frozen=True)
class _Trace:
    kernels: dict[int, Kernel]  # by the identity of the tracer
    token: Any
    level: Any


_traces = threading.local()


@contextlib.contextmanager
def tracing(kernels: Sequence[Kernel], token: Any) -> Iterator[None]:
    """`dense` knows these kernels meanwhile, on this thread. `token`: an argument that gets what pushes give."""
    stack = vars(_traces).setdefault("stack", [])
    stack.append(_Trace({id(kernel.tagged): kernel for kernel in kernels}, token, _trace_state(convention="flax")))
    try:
        yield
    finally:
        stack.pop()


def dense(inputs: Any, kernel: Any) -> Any:
    """`inputs @ kernel`, for inputs (..., m) and a kernel (m, n).

    In the function of `value_and_grad` the kernel's gradient travels as its factors, inputs and the gradient of the
    product, if that is less and the kernel is a float32 parameter as the function has got it. Everywhere else it is an
    ordinary product. Raises InvalidArgument if such a kernel is used by something else, too.
    """
    trace = _innermost(kernel)
    if trace is None or jnp.ndim(kernel) != 2 or jnp.ndim(inputs) < 1:
        return jnp.matmul(inputs, kernel)
    if kernel.dtype != jnp.float32 or jnp.result_type(inputs, kernel) != jnp.float32:
        return jnp.matmul(inputs, kernel)
    known, inputs = trace.kernels[id(kernel)], jnp.asarray(inputs, jnp.float32)
    known.row_counts.append(inputs.size // max(1, inputs.shape[-1]))
    return _product(known)(inputs, known.own, trace.token)


def _innermost(kernel: Any) -> _Trace | None:
    level = _trace_state(convention="flax")
    for trace in reversed(vars(_traces).get("stack", [])):
        if id(kernel) in trace.kernels:
            return trace if trace.level == level else None
    return None


def _product(known: Kernel) -> Callable[..., Any]:
    @jax.custom_vjp
    def product(inputs: Any, kernel: Any, token: Any) -> Any:
        return jnp.matmul(inputs, kernel)

    def forward(inputs: Any, kernel: Any, token: Any) -> tuple[Any, Any]:
        return jnp.matmul(inputs, kernel), (inputs, kernel)

    def backward(kept: Any, slope: Any) -> tuple[Any, Any, Any]:
        inputs, kernel = kept
        left, right = inputs.reshape(-1, inputs.shape[-1]), slope.reshape(-1, slope.shape[-1])
        if known.has_factors:
            gradient, sent = known.push(left, right)
        else:  # there are several products: their sum is pushed when it is there
            gradient, sent = left.T @ right, jnp.float32(0)
        return jnp.matmul(slope, kernel.T), gradient, sent

    product.defvjp(forward, backward)
    return product
