"""What torch.distributed's reductions are for the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp as TorchOp

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.torch.backend.arrays import Finish

Op = _core.ReduceOp

_OPS = {
    TorchOp.SUM: Op.sum,
    TorchOp.AVG: Op.sum,
    TorchOp.PRODUCT: Op.product,
    TorchOp.MIN: Op.min,
    TorchOp.MAX: Op.max,
    TorchOp.BAND: Op.band,
    TorchOp.BOR: Op.bor,
    TorchOp.BXOR: Op.bxor,
}
# Truth values travel as bytes of 0 and 1.
_OF_BOOL = {Op.sum: Op.max, Op.product: Op.min, Op.band: Op.min, Op.bor: Op.max}
_NOT_COMPLEX = (Op.product, Op.min, Op.max)


@dataclass(frozen=True)
class Reduction:
    """How the ranks' tensors become one."""

    op: _core.ReduceOp
    mean_of: int = 1  # ranks; 1: no mean

    def check(self, caller: str, tensor: torch.Tensor) -> None:
        """Raises InvalidArgument where there is no such reduction of a tensor of this type."""
        if tensor.layout != torch.strided:
            raise InvalidArgument(f"{caller} got a tensor of layout {tensor.layout}: pass tensor.to_dense()")
        if tensor.is_complex() and self.op in _NOT_COMPLEX:
            raise InvalidArgument(f"{caller} has no {self.op.name} of complex numbers: pass a real tensor")
        if self.mean_of > 1 and tensor.dtype == torch.bool:
            raise InvalidArgument(f"{caller} has no mean of truth values: pass tensor.float()")

    def check_sparse(self, caller: str) -> None:
        """Raises InvalidArgument unless what ranks have at an index can be combined without those that have nothing."""
        if self.op != Op.sum:
            raise InvalidArgument(
                f"{caller} only adds sparse tensors, it has no {self.op.name} of them: pass tensor.to_dense()"
            )

    def op_for(self, tensor: torch.Tensor) -> _core.ReduceOp:
        """How the core combines elements of this tensor."""
        return _OF_BOOL.get(self.op, self.op) if tensor.dtype == torch.bool else self.op

    def divisor_for(self, tensor: torch.Tensor) -> int:
        """By what the core divides their sum."""
        return self.mean_of if tensor.is_floating_point() or tensor.is_complex() else 1

    def finish(self, memory: torch.Tensor) -> Finish | None:
        """What divides a sum of whole numbers, rounding towards zero, as torch's other backends do."""
        if self.mean_of == 1 or memory.is_floating_point():
            return None

        def divide() -> None:
            memory.div_(self.mean_of, rounding_mode="trunc")

        return divide


def reduction_of(caller: str, opts: Any, size: int) -> Reduction:
    """What `opts`, a ReduceOp or torch's options with one, asks for. Without any it is a sum."""
    given = TorchOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    for known, op in _OPS.items():
        if given == known:
            return Reduction(op, size if known == TorchOp.AVG else 1)
    raise InvalidArgument(f"{caller} does not know {given}: give one of {', '.join(op.name for op in _OPS)}")
