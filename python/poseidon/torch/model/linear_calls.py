"""Which calls of a Linear layer have a weight gradient that is the product of factors, and who gets these."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

TORCHS_LINEAR: Any = torch._C._nn.linear


class FactorTaker(Protocol):
    """The object that gets the factors of a weight's gradient."""

    param: nn.Parameter
    intercepted: bool
    """Whether the last forward call outside backward met something else than torch's own F.linear."""

    @property
    def armed(self) -> bool:
        """Whether the rows of the forward pass that runs now count."""

    def count_forward_rows(self, row_count: int) -> None:
        """Notes K of one forward call."""

    def take_factors(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Gets the rows of one use of the layer; if it returns False the caller returns the dense gradient."""


def fits(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether F.linear takes these, and its gradient is known. Compiled code asks, too, when it is compiled."""
    if type(input) not in (torch.Tensor, nn.Parameter) or input.layout != torch.strided:
        return False
    if input.dim() == 0 or input.shape[-1] != weight.shape[1] or input.device != weight.device:
        return False
    if torch.is_autocast_enabled(input.device.type):
        # Autocast leaves float64 alone.
        dtypes = (input.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        return all(dtype.is_floating_point and dtype != torch.float64 for dtype in dtypes)
    return input.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)


def cast(input: torch.Tensor) -> torch.Tensor:
    """`input` in the type in which autocast, if it is on, computes.

    It is cast here and the weight inside of the function: there autocast's own, cached casts could lose their history.
    """
    device = input.device.type
    return input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input


def compute(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear in the type of `input`."""
    return F.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether no class of the tensor's intercepts functions of torch."""
    kind = type(tensor)
    return kind is torch.Tensor or kind.__torch_function__ is torch._C._disabled_torch_function_impl
