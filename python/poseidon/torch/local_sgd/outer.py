"""The outer optimizer of DiLoCo: what servers make of the workers' progress."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from poseidon.errors import InvalidArgument


@dataclass(frozen=True)
class OuterNesterov:
    """SGD with Nesterov momentum on the servers, for `LocalSGD(outer=...)` (DiLoCo, Douillard et al. 2023, §2).

    Its gradient is the *pseudo-gradient*: the global parameters of the last averaging minus the worker's parameters,
    averaged over the workers. The defaults are those of the paper. `momentum=0` is plain SGD: with `lr=1` its result is
    the mean of the workers' parameters, up to rounding. Raises InvalidArgument for values outside their ranges.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise InvalidArgument(f"the outer lr is {self.lr}: it must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"the outer momentum is {self.momentum}: it must be from 0 to less than 1")

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.SGD:
        """The optimizer of torch with the same arithmetic."""
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


PLAIN_MEAN = OuterNesterov(lr=1.0, momentum=0.0)
"""The mean of the workers' parameters, made of pseudo-gradients, which lose less than parameters when rounded."""
