"""Runs a torch optimizer on some of its parameters at a time, with the arithmetic of its own step()."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.errors import InvalidArgument, PoseidonError

Hyperparameters = list[dict[str, Any]]
"""What each parameter group says beside its parameters."""

# Each updates a parameter from this parameter's gradient and state alone. Some are not in every version of torch.
_PER_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in [
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "Adafactor",
        "Muon",
    ]
    if hasattr(torch.optim, name)
)
_REFUSED = {
    torch.optim.LBFGS: "searches along a direction that all gradients together give, with several backward passes",
}
_INSTEAD = "use the optimizer itself with the model, without DistributedOptimizer"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_HYPERPARAMETERS = ("params", "param_names")


class PartialStep:
    """The step() of one optimizer, for all or some of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def hyperparameters(self) -> Hyperparameters:
        """Those of all groups as they are now; later changes, also of tensors, have no effect on them."""
        return [
            {key: _snapshot(value) for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            for group in self._optimizer.param_groups
        ]

    def run_all(self) -> None:
        """The whole step, without the hooks."""
        _plain_step(self._optimizer)

    def run(self, hyperparameters: Hyperparameters, params: Sequence[Sequence[torch.Tensor]]) -> None:
        """The step of `params` (those of each group), which have gradients."""
        groups = [{**values, "params": list(chosen)} for values, chosen in zip(hyperparameters, params, strict=True)]
        before = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            _plain_step(self._optimizer)
        finally:
            self._optimizer.param_groups = before
        for values, group in zip(hyperparameters, groups, strict=True):
            changed = [key for key in group if key != "params" and values.get(key) is not group[key]]
            if changed:
                raise PoseidonError(
                    f"{type(self._optimizer).__name__} keeps {', '.join(changed)} of its parameter groups from step to "
                    f"step, which cannot be done layer by layer: {_INSTEAD}"
                )


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(_snapshot, value)) if isinstance(value, tuple) else value


def _plain_step(optimizer: Optimizer) -> None:
    """step() without the optimizer's hooks, also where a subclass calls the step() of its parent class."""
    step: Any = type(optimizer).step
    # Around step() torch puts a function that runs hooks and labels profiles, too slow for a part of a step.
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    hooks = {name: getattr(optimizer, name) for name in _HOOKS if getattr(optimizer, name)}
    for name in hooks:
        setattr(optimizer, name, {})
    try:
        with torch.no_grad():
            step(optimizer)
    finally:
        for name, before in hooks.items():
            setattr(optimizer, name, before)


def check_per_parameter(optimizer: Optimizer) -> None:
    """InvalidArgument unless the optimizer gives the same bits when it steps parameter by parameter."""
    name = type(optimizer).__name__
    for kind, why in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise InvalidArgument(f"{name} {why}, so layers cannot be updated one by one: {_INSTEAD}")
    own = vars(optimizer).get("step")  # learning-rate schedulers put one there that only counts calls
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise InvalidArgument(f"this {name} has a step() of its own, put there after it was made: {_INSTEAD}")
    if type(optimizer) in _PER_PARAMETER:
        return
    try:
        together, apart = _trial(optimizer, [[0, 1]]), _trial(optimizer, [[1], [0]])
    except Exception as error:
        raise InvalidArgument(
            f"{name} is no optimizer of torch.optim, and a trial step of it on two small tensors, to see whether it "
            f"updates each parameter on its own, failed ({type(error).__name__}: {error}): {_INSTEAD}"
        ) from error
    if not all(map(torch.equal, together, apart)):
        raise InvalidArgument(
            f"{name} does not update each parameter on its own (a trial on two small tensors gave others for both "
            f"at once than one by one), so layers cannot be updated one by one: {_INSTEAD}"
        )


def _trial(optimizer: Optimizer, rounds: list[list[int]]) -> list[torch.Tensor]:
    """Two small tensors after three steps of such an optimizer, each step in these rounds."""
    generator = torch.Generator().manual_seed(0)
    like = optimizer.param_groups[0]["params"][0]
    params = [
        torch.nn.Parameter((scale * torch.randn(shape, generator=generator)).to(like))
        for scale, shape in ((0.5, (3, 4)), (20.0, (5, 2)))
    ]
    grads = [[torch.randn(param.shape, generator=generator).to(like) for param in params] for _ in range(3)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stepper = PartialStep(_double(optimizer, params))
        for step_grads in grads:
            for param, grad in zip(params, step_grads, strict=True):
                param.grad = grad
            for chosen in rounds:
                stepper.run(stepper.hyperparameters(), [[params[index] for index in chosen]])
    return [param.detach() for param in params]


def _double(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> Optimizer:
    """An optimizer of that kind and with those hyperparameters for other parameters."""
    group = {**PartialStep(optimizer).hyperparameters()[0], "params": params}
    double: Optimizer = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("param_groups", "state", "step"):
            vars(double)[key] = _own_copy(value)
    double.param_groups, double.state = [group], defaultdict(dict)
    return double


def _own_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be copied (a lock, a file) is hardly what an update computes with
        return value
