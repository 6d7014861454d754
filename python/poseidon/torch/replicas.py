"""Replicas of sharded models between machines: FSDP2 inside a machine, Poseidon between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poseidon.adapter.layer import LossyChoice, SchemeChoice, WireChoice
from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel

_REPLICAS = "_poseidon_replicas"


def replicate(
    model: nn.Module,
    mesh: Any,
    *,
    scheme: SchemeChoice | None = None,
    wire: WireChoice | None = None,
    lossy: LossyChoice | None = None,
) -> nn.Module:
    """Lets `model`, which `fully_shard` has sharded, train as one of several replicas. Returns the model.

    `mesh` is the dimension whose ranks have the same shards, one on each machine, such as `mesh["replicate"]`; or a
    process group of these ranks. The model was sharded over the other dimension alone. Its first parameters and buffers
    become those of the first replica. From then on `backward()` returns with gradients that are means over all
    replicas: each shard is exchanged from the moment in which its gradient is reduced inside the machine, while
    backward goes on. `scheme`, `wire` and `lossy` are those of `DistributedDataParallel`, which does the same with
    methods of its own, such as `plan()`. Collective among the ranks of the mesh. Raises InvalidArgument for a model
    that is not sharded so, with what to write.
    """
    _check_sharded(model)
    if hasattr(model, _REPLICAS):
        raise InvalidArgument("this model is replicated already: call replicate() once, on the whole model")
    over: dict[str, Any] = {"process_group": mesh} if isinstance(mesh, torch.distributed.ProcessGroup) else {}
    if not over:
        _check_one_dimension(mesh)
        over = {"device_mesh": mesh}
    replicas = _Replicas(model, **over, forward_sync_buffers=False, scheme=scheme, wire=wire, lossy=lossy)
    replicas.trained_model().exchange_every_gradient()
    model.register_forward_pre_hook(replicas.before, prepend=True)  # before FSDP gathers the parameters
    model.register_forward_hook(replicas.after)
    object.__setattr__(model, _REPLICAS, replicas)
    return model


class _Replicas(DistributedDataParallel):
    """What exchanges the gradients of a model that is called without a wrapper. It is held by the model's hooks."""

    def before(self, _module: nn.Module, _inputs: Any) -> None:
        """A forward pass begins."""
        self._begin_forward((), {}, compiled=False)

    def after(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """It has returned this."""
        self._end_forward(output)


def _check_sharded(model: nn.Module) -> None:
    """InvalidArgument if `fully_shard` has not made the model ready for replicas."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found = False
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise InvalidArgument(
                f"module {name!r} is a FullyShardedDataParallel: use fully_shard() of torch.distributed.fsdp"
            )
        found = found or isinstance(module, FSDPModule)
    if not found:
        raise InvalidArgument(
            "the model is not sharded: call fully_shard() on it first, or wrap it by "
            "poseidon.DistributedDataParallel(model, device_mesh=mesh)"
        )


def _check_one_dimension(mesh: Any) -> None:
    if getattr(mesh, "ndim", 0) != 1:
        name = (getattr(mesh, "mesh_dim_names", None) or ["replicate"])[0]
        raise InvalidArgument(f"replicate() got {mesh!r}: give it one dimension of a mesh, such as mesh[{name!r}]")
