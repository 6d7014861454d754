"""Optimizers that torch.optim does not have, for tests: per parameter or not, and some that seem to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Signed(Optimizer):
    """Per parameter, but nobody knows: the update of Lion."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def params(self) -> Iterator[torch.Tensor]:
        return (param for group in self.param_groups for param in group["params"] if param.grad is not None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(average.lerp(param.grad, 0.1).sign_(), alpha=group["lr"])
                average.lerp_(param.grad, 0.01)


class Smooth(Signed):
    """Per parameter, but nobody knows: steps by an average of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    param.sub_(average.lerp_(param.grad, 0.3), alpha=group["lr"])


class Noisy(Signed):
    """Takes random numbers, so the order of parameters counts."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for param in self.params():
            param.data.add_(torch.randn_like(param), alpha=0.1)


class Normed(Signed):
    """Scales by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads: list[Any] = [param.grad for param in self.params()]
        if grads:
            torch._foreach_div_(grads, torch.stack([grad.norm() for grad in grads]).norm())
        super().step()


class GroupCount(Signed):
    """Counts its steps in the parameter group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step_count"] = group.get("step_count", 0) + 1
        super().step()


class OwnCount(Signed):
    """Counts its steps in an attribute, which its update follows."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"], lr = group["lr"] / self.count, group["lr"]
        super().step()
        for group in self.param_groups:
            group["lr"] = lr


class Momentum(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)

    def with_gradient(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]


class SkipsBad(Momentum):
    """No step if some gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        if all(bool(param.grad.isfinite().all()) for param in self.with_gradient()):
            return super().step(closure)
        return None


class ClipsTotal(Momentum):
    """Limits the norm of all gradients, which is large only later."""

    def __init__(self, params: Any, limit: float = 0.01) -> None:
        super().__init__(params)
        self.limit = limit

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.with_gradient(), self.limit)
        return super().step(closure)


class SlowWeights(Momentum):
    """Every fourth step goes half of the way back."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        for param in self.with_gradient():
            slow = self.state[param].setdefault("slow", param.clone())
            if self.count % 4 == 0:
                slow.lerp_(param, 0.5)
                param.copy_(slow)


class EverySecond(Momentum):
    """Steps with every second gradient only."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure) if self.count % 2 == 0 else None


class LargestOnly(Momentum):
    """Updates the parameter with the largest gradient."""

    def step(self, closure: Any = None) -> Any:
        params = self.with_gradient()
        norms = [float(param.grad.norm()) for param in params]
        kept = {param: param.grad for param in params}
        for param, norm in zip(params, norms, strict=True):
            param.grad = kept[param] if norm == max(norms) else None
        result = super().step(closure)
        for param, grad in kept.items():
            param.grad = grad
        return result


def replaced_step(params: Any) -> Optimizer:
    """step() of this object alone looks at all gradients."""
    optimizer = Momentum(params)
    plain = optimizer.step

    def step(closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(optimizer.with_gradient(), 0.05)
        return plain(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def replaced_below_a_scheduler(params: Any) -> Optimizer:
    """The same, with a scheduler's counter around it."""
    optimizer = SGD(params, lr=0.05, momentum=0.9)

    def step(self: SGD, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(list(self.param_groups[0]["params"]), 0.05)
        return SGD.step(self, closure)

    optimizer.step = step.__get__(optimizer)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer


NOT_PER_PARAMETER: list[Callable[[Any], Optimizer]] = [
    *(Noisy, Normed, GroupCount, OwnCount, SkipsBad, ClipsTotal, SlowWeights, EverySecond, LargestOnly),
    *(replaced_step, replaced_below_a_scheduler),
]
