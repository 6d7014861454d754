"""Sufficient factors of a Linear layer that tensor parallelism has cut by its columns or by its rows.

The layer computes what PyTorch makes of its DTensors. Where its weight is cut by columns (`Shard(0)`), all ranks have
the input, and the gradient of a part is the product of the output gradients of these columns and the input. Where it is
cut by rows (`Shard(1)`), it is that of all output gradients and the part of the input (Poseidon §3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from poseidon.torch.model.linear_calls import FactorTaker
from poseidon.torch.tensors.shard import Shard


def gives_factors(shard: Shard) -> bool:
    """Whether calls of a Linear layer whose weight this is may give factors: it is no part of FSDP's, and cut once."""
    placements = shard.whole.placements
    return shard.group is None and len(placements) == 1 and any(placements[0].is_shard(dim) for dim in (0, 1))


class _CutLinear(torch.autograd.Function):
    """Hands over the factors of the weight's gradient. Its output is its first input."""

    @staticmethod
    def forward(ctx: Any, output: Any, weight: Any, right: torch.Tensor, taker: FactorTaker) -> Any:
        ctx.set_materialize_grads(False)  # no gradient is not one of zeros
        ctx.taker = taker
        ctx.weight = weight.device_mesh, weight.placements, weight.shape, weight.stride(), type(weight.data)
        # What is summed up over the ranks has the same gradient on all of them.
        ctx.placements = [_replicate() if one.is_partial() else one for one in output.placements]
        ctx.save_for_backward(right)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None, None
        (right,) = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            mesh, placements, shape, stride, kind = ctx.weight
            left = grad.redistribute(placements=ctx.placements).to_local()
            left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
            if not ctx.taker.take_factors(left, right):
                part = left.t() @ right
                grad_weight = kind.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        return grad, grad_weight, None, None


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def cut_linear(taker: FactorTaker, input: Any, weight: Any, bias: Any) -> Any:
    """F.linear of these, whose weight gradient may be handed over to `taker`."""
    if not _is_known(input, weight):
        return F.linear(input, weight, bias)
    output = F.linear(input, weight.detach(), bias)
    right = input.detach().to_local()
    if taker.armed:
        taker.count_forward_rows(right.numel() // right.shape[-1])
    return _CutLinear.apply(output, weight, right, taker)


def _is_known(input: Any, weight: Any) -> bool:
    """Whether the input lies as the cut of the weight wants it, so that nothing is sent for their product."""
    if type(input) is not type(weight.data) or input.device_mesh != weight.device_mesh or input.dim() == 0:
        return False
    if torch.is_autocast_enabled(input.device.type) or input.dtype != weight.dtype:
        return False
    (cut,), (place,) = weight.placements, input.placements
    return bool(place.is_replicate() if cut.is_shard(0) else place.is_shard(input.dim() - 1))
