"""Replicas of sharded models between machines: FSDP2 inside a machine, Poseidon between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from poseidon.errors import InvalidArgument
from poseidon.torch.backend.group import NAME, ProcessGroup
from poseidon.torch.backend.work import Work

_GUARD = "_poseidon_replicas"
_NO_BACKWARD = -1


def replicate(model: nn.Module, mesh: Any) -> nn.Module:
    """Lets `model`, which `fully_shard` has sharded, train as one of several replicas. Returns the model.

    `mesh` is the dimension whose ranks have the same shards, one on each machine, such as `mesh["replicate"]`; or a
    process group of these ranks. The model was sharded over the other dimension alone. Its first parameters and buffers
    become those of the first replica. From then on `backward()` returns with gradients that are means over all
    replicas: each group of parameters is exchanged from the moment in which its gradient is reduced inside the machine,
    while backward goes on. Collective among the ranks of the mesh. Raises InvalidArgument for a model that is not
    sharded so, with what to write.
    """
    units = list(_units(model))
    group = _group_of(mesh)
    if hasattr(model, _GUARD):
        raise InvalidArgument("this model is replicated already: call replicate() once, on the whole model")
    replicas = _Replicas(group)
    for unit in units:
        unit.set_all_reduce_hook(replicas.hook_of(unit))
    replicas.take_over_first(model)
    object.__setattr__(model, _GUARD, replicas)
    return model


def _units(model: nn.Module) -> Iterator[Any]:
    """The modules that fully_shard has made."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found = False
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise InvalidArgument(
                f"module {name!r} is a FullyShardedDataParallel: use fully_shard() of torch.distributed.fsdp"
            )
        if not isinstance(module, FSDPModule):
            continue
        found = True
        for params in _groups_of(module):
            if params._is_hsdp:
                raise InvalidArgument(
                    f"module {name!r} was sharded over a mesh of two dimensions, so torch exchanges its replicas: give "
                    'fully_shard() the dimension inside the machine, mesh["shard"], alone'
                )
        if len(_groups_of(module)) > 1:
            raise InvalidArgument(
                f"module {name!r} has parameters on several meshes: give all of them to fully_shard() with one mesh"
            )
        yield module
    if not found:
        raise InvalidArgument(
            "the model is not sharded: call fully_shard() on it first, or wrap it by "
            "poseidon.DistributedDataParallel(model, process_group=mesh.get_group())"
        )


def _groups_of(module: Any) -> list[Any]:
    """FSDP's groups of parameters of a module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def exchange_replicas() -> Callable[[], None]:
    """From now on the replicas of torch's own HSDP and replicate() exchange by Poseidon. Returns what undoes it.

    Raises ImportError for a torch that has no such models.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    replicated: Any = _fsdp_common.DDPMeshInfo
    inner = replicated.__post_init__

    def __post_init__(self: Any) -> None:
        inner(self)
        self.replicate_process_group = _group_of(self.replicate_process_group)

    replicated.__post_init__ = __post_init__

    def restore() -> None:
        replicated.__post_init__ = inner

    return restore


_made: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()  # by torch's group of the same ranks


def _group_of(mesh: Any) -> ProcessGroup:
    """The process group of the backend with these ranks, which is made if there is none."""
    if not isinstance(mesh, dist.ProcessGroup):
        if getattr(mesh, "ndim", 0) != 1:
            name = (getattr(mesh, "mesh_dim_names", None) or ["replicate"])[0]
            raise InvalidArgument(f"replicate() got {mesh!r}: give it one dimension of a mesh, such as mesh[{name!r}]")
        mesh = mesh.get_group()
    if isinstance(mesh, ProcessGroup):
        return mesh
    if mesh not in _made:
        _made[mesh] = dist.new_group(
            dist.get_process_group_ranks(mesh), backend=NAME, use_local_synchronization=True, group_desc="replicas"
        )
    return _made[mesh]


class _Replicas:
    """The exchanges between the replicas of one model."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._pending: list[Work] = []
        self._backward = _NO_BACKWARD  # the one whose end waits for them

    def take_over_first(self, model: nn.Module) -> None:
        """Overwrites parameters and buffers with those of the first replica."""
        with torch.no_grad():
            tensors = [*model.parameters(), *model.buffers()]
            works = [self._group.broadcast(_local(tensor).detach(), 0) for tensor in tensors]
        for work in works:
            work.wait()

    def hook_of(self, unit: Any) -> Any:
        """What FSDP calls with the gradient of a unit's shard, which is a mean over the shards' ranks."""

        def exchange(gradient: torch.Tensor) -> None:
            work = self._group.allreduce([gradient], dist.ReduceOp.AVG)
            backward = torch._C._current_graph_task_id()
            if backward == _NO_BACKWARD or not _is_final(unit, gradient):
                work.wait()
                return
            self._pending.append(work)
            if backward != self._backward:  # what is left of one that has failed is waited for, too
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(self._wait)

        return exchange

    def _wait(self) -> None:
        pending, self._pending, self._backward = self._pending, [], _NO_BACKWARD
        for work in pending:
            work.wait()


def _is_final(unit: Any, gradient: torch.Tensor) -> bool:
    """Whether nobody reads or changes the gradient between this and the end of backward.

    FSDP may divide it, convert it, add it to what was accumulated, copy it to the host and call hooks.
    """
    (params,) = _groups_of(unit)
    if gradient.device.type != "cpu" or params.gradient_divide_factor is not None:
        return False
    # FSDP converts a gradient of another dtype than the parameters', whatever its reduce_dtype says.
    if gradient.dtype != params._orig_dtype or not _divides_by_mean(params, gradient):
        return False
    return all(
        one.sharded_param.grad is None
        and not one.offload_to_cpu
        and not getattr(one.sharded_param, "_post_accumulate_grad_hooks", None)
        for one in params.fsdp_params
    )


def _divides_by_mean(params: Any, gradient: torch.Tensor) -> bool:
    """Whether the reduction inside the machine divides, so that FSDP does not afterwards. False if nobody knows."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    try:
        factors = _fsdp_collectives._get_gradient_divide_factors(
            params._reduce_scatter_process_group,
            None,
            gradient.dtype,
            gradient.device.type,
            None,
            params.force_sum_reduction_for_comms,
        )
    except (AttributeError, TypeError):  # of another version of torch
        return False
    return factors[1] is None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
