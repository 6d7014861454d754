"""What `LocalSGD` takes: its arguments, and the parameters of its optimizer."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer

from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument
from poseidon.torch.local_sgd.averaging import OuterNesterov
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.optimizer.wrapper import OptimizerWrapper


def check_arguments(model: nn.Module, optimizer: Optimizer, every: int, outer: OuterNesterov | None) -> None:
    """Raises InvalidArgument for arguments of `LocalSGD` that are not what they must be, with what to pass."""
    if isinstance(optimizer, DistributedOptimizer):
        Features.refuse("local_sgd", "distributed_optimizer")
    if isinstance(optimizer, OptimizerWrapper):
        raise InvalidArgument(
            f"the optimizer is a poseidon.{type(optimizer).__name__} already: pass the torch optimizer itself"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        kinds = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise InvalidArgument(f"LocalSGD got {kinds}: pass the model first, and then a torch.optim.Optimizer")
    if any(isinstance(part, TorchDistributedDataParallel) for part in model.modules()):
        Features.refuse("local_sgd", "wrapped")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InvalidArgument(f"every is {every!r}: it is the number of steps between averagings, 1 or more")
    if outer is not None and not isinstance(outer, OuterNesterov):
        raise InvalidArgument(f"outer is a {type(outer).__name__}: pass poseidon.OuterNesterov(lr=0.7, momentum=0.9)")


def check_parameters(model: nn.Module, optimizer: Optimizer, found: list[SyncedParameter]) -> None:
    """Raises InvalidArgument for an optimizer with parameters that are not averaged. `found`: those that are."""
    if not found:
        raise InvalidArgument("LocalSGD needs a model with at least one parameter that requires a gradient")
    names = {param: name for name, param in model.named_parameters()}
    averaged = {entry.whole for entry in found}
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if param not in names:
                raise InvalidArgument(
                    f"parameter {index} of group {number} of the optimizer is not the model's, so that it would differ "
                    "between the ranks: pass the model that the optimizer trains"
                )
            if param.requires_grad and param.numel() and param not in averaged:
                raise InvalidArgument(
                    f"parameter {names[param]} is new or trains now, and LocalSGD averages those that trained when it "
                    "was made: make a new LocalSGD on every rank after the model changes"
                )
