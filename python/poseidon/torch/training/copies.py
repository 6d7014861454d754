"""What is copied and saved of a wrapped model.

A copy is a model of its own, which computes alone until it is trained. Its `state_dict()` has the residuals of lossy
schemes and wire formats: what this rank has not sent yet. They are the extra state of the wrapper, in the form in which
torch's modules have one. A model without such layers has none, so that its `state_dict()` stays that of torch's class.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

from poseidon.errors import InvalidArgument
from poseidon.torch.process.process_groups import default_group
from poseidon.torch.training.trained_model import TrainedModel, Wrapper

_OF_THIS_PROCESS = ("_trained", "process_group", "device_mesh")  # not in copies and pickles


class ModelCopies(Wrapper):
    """The methods of `DistributedDataParallel` about its copies and pickles."""

    module: nn.Module
    process_group: Any
    device_mesh: Any
    training: bool
    device_ids: Any
    require_backward_grad_sync: bool
    _trained: TrainedModel | None

    def _computes_alone(self) -> bool:
        """Whether a forward pass that begins now is one of a copy that no rank has trained yet, and trains nothing.

        One rank alone may evaluate an average of weights, so such a pass must not meet the other ranks.
        """
        return self._trained is None and not (torch.is_grad_enabled() and self.training)

    @torch._disable_dynamo(recursive=False)
    def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[attr-defined]
            inputs, kwargs = moved[0], moved_kwargs[0]
        output = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():  # it may be trained all the same, as in fine-tuning with fixed statistics
            meet = partial(_meet, weakref.ref(self), self.require_backward_grad_sync)
            for tensor in _find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(meet)
        return output

    def __getstate__(self) -> dict[str, Any]:
        if self._trained is not None and not self._trained.context.is_world:
            raise InvalidArgument(
                "a DistributedDataParallel of a process_group cannot be pickled, since the group belongs to this "
                "process: save model.module, or model.state_dict()"
            )
        return self._copied_state()

    def _copied_state(self) -> dict[str, Any]:
        if self._trained is not None and self._trained.sync is not None:
            self._trained.sync.settle()
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        self.process_group = default_group()
        self.device_mesh = self._trained = None
        self._comm_hooks: list[Any] = []  # as torch's class, which makes copies without them
        self.comm_hook_name = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._copied_state(), memo))
        copied.process_group, copied.device_mesh = self.process_group, self.device_mesh
        return copied


@torch._disable_dynamo
def _meet(reference: weakref.ref[Any], synchronizing: bool, *_: Any) -> None:
    """A backward pass has reached an output of a copy that has computed alone."""
    model = reference()
    if model is None or not synchronizing:
        return
    trained = model.trained_model()
    if trained.sync is not None and not trained.sync.passes.armed:
        trained.begin_training_pass(True)


_KEY = "_extra_state"  # torch's name of it


def keep_in_state_dict(model: nn.Module) -> None:
    """Makes `state_dict()` and `load_state_dict()` of this wrapper include the residuals of this rank."""
    model._register_state_dict_hook(_add)
    model._register_load_state_dict_pre_hook(_take, with_module=True)  # torch 2.4 has no public name for it


def _add(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    trained: TrainedModel | None = model._trained
    if trained is None or trained.sync is None or not any(entry.asked.may_lose for entry in trained.entries):
        return
    residuals = {layer.name: torch.from_numpy(residual) for layer, residual in trained.sync.layers.residuals().items()}
    state[prefix + _KEY] = {"rank": trained.context.rank, "residuals": residuals}


def _take(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    kept = state.pop(prefix + _KEY, None)
    trained: TrainedModel | None = model._trained
    if trained is None or trained.sync is None or not any(entry.asked.may_lose for entry in trained.entries):
        return
    if kept is None or kept["rank"] != trained.context.rank:
        whose = "has no residuals" if kept is None else f"has the residuals of rank {kept['rank']}"
        warnings.warn(
            f"the loaded state {whose}, so rank {trained.context.rank} starts without what lossy schemes or wire "
            "formats had not sent: save and load model.state_dict() on every rank to keep it",
            stacklevel=4,
        )
        trained.sync.layers.load_residuals({})
        return
    by_name = {entry.name: entry for entry in trained.entries}
    trained.sync.layers.load_residuals(
        {by_name[name]: residual.numpy() for name, residual in kept["residuals"].items() if name in by_name}
    )
