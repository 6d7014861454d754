"""What one rank has of a module that is sharded: its parts of the DTensors, as plain parameters in the same memory.

`fully_shard` (FSDP2) and tensor parallelism make DTensors of a module's parameters. The ranks that have the same parts
are replicas of each other. Their gradients, buffers and updates are exchanged as those of a module of these parts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection
from operator import is_
from typing import Any

from torch import nn

from poseidon.adapter.features import Features
from poseidon.adapter.shard_group import ShardGroup
from poseidon.errors import InvalidArgument
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.shard import Shard, local_part
from poseidon.torch.tensors.watched import raw_grad, touch

_WHEN = "when the model was wrapped: wrap it again, on all ranks"
_SINCE = "since the model was wrapped: shard and load the model first, and wrap it then, on all ranks"


def kinds() -> Any:
    """The class of DTensors, in a tuple; an empty one where the program has none."""
    # It has not imported their module then, which takes long. torch 2.4 has them in the private one.
    homes = [sys.modules.get(f"torch.distributed.{home}") for home in ("tensor", "_tensor")]
    return tuple(getattr(home, "DTensor") for home in homes if hasattr(home, "DTensor"))  # noqa: B009


def dtensors(module: nn.Module) -> dict[str, Any]:
    """The parameters of a module that are DTensors, by name, tied ones by each of their names."""
    known = kinds()
    found = module.named_parameters(remove_duplicate=False) if known else ()
    return {name: param for name, param in found if isinstance(param, known)}


class LocalShards(nn.Module):
    """A module that has this rank's parts of the parameters of `whole`, and its other parameters and buffers.

    All of them keep their names. The parts lie in the memory of the DTensors.
    """

    def __init__(self, whole: nn.Module) -> None:
        """InvalidArgument, naming the parameter, for a DTensor that has no part of its own on this rank."""
        super().__init__()
        self._whole = weakref.ref(whole)  # not a module of this one
        self.written()  # in place of its DTensors FSDP may have left the parameters that it has gathered
        sharded = dtensors(whole)
        self._shards: dict[Any, Shard] = {}
        for name, param in whole.named_parameters(remove_duplicate=False):
            if name in sharded and param not in self._shards:
                self._shards[param] = Shard.of(name, param)
            self._parameters[name] = self._shards.get(param, param)
        self._names = {param: name for name, param in sharded.items()}
        self._known = set(whole.parameters())
        self._frozen = {param for param in self._shards if not param.requires_grad}
        self._tables = [
            (table, list(table.values())) for part in whole.modules() for table in (part._parameters, part._modules)
        ]
        for name, buffer in whole.named_buffers(remove_duplicate=False):
            self._buffers[name] = buffer
        for group in _fsdp_groups(whole):
            for one in group.fsdp_params:
                self._shards[one.sharded_param].group = group
            if not isinstance(group.unshard, _Before):
                # It gathers the parts past PyTorch's dispatch: updates of them that are due come first.
                group.unshard = _Before(group, "unshard", touch)
                group.post_backward = _Before(group, "post_backward", _resolve)

    def show_gradients(self, *_: Any) -> None:
        """All exchanges of a backward pass are over: whoever looks at `.grad` of a DTensor sees a DTensor."""
        for shard in self._shards.values():
            shard.show()

    @property
    def whole(self) -> nn.Module:
        """The module itself. RuntimeError once it is gone."""
        if (whole := self._whole()) is None:
            raise RuntimeError("the model whose shards these are does not exist any more")
        return whole

    def written(self) -> None:
        """Frees what FSDP has gathered, which is past when the parts have been written to."""
        for part in _fsdp_modules(self.whole):
            part.reshard()

    def check(self) -> None:
        """InvalidArgument if the module has other parameters now, or in other memory, than when this was made.

        A parameter may be frozen for a while.
        """
        for param, part in self._shards.items():
            if local_part(param).data_ptr() != part.data_ptr():
                raise InvalidArgument(f"parameter {self._names[param]} lies elsewhere {_SINCE}")
            if param.requires_grad != part.requires_grad:
                if param in self._frozen:
                    raise InvalidArgument(
                        f"parameter {self._names[param]} requires a gradient now, and did not {_WHEN}"
                    )
                part.requires_grad_(param.requires_grad)
        if not all(len(table) == len(held) and all(map(is_, table.values(), held)) for table, held in self._tables):
            self._check_new()

    def _check_new(self) -> None:
        """FSDP has gathered some parameters, or the program has made new ones."""
        gathered = {
            getattr(one, "_unsharded_param", None) for group in _fsdp_groups(self.whole) for one in group.fsdp_params
        }
        for name, param in self.whole.named_parameters():
            known = param in self._known or param in gathered
            if not known and (param.requires_grad or isinstance(param, kinds())) and param.numel():
                raise InvalidArgument(f"parameter {name} was put into the model {_SINCE}")

    def check_complete(self, ignored: Collection[str]) -> None:
        """InvalidArgument for a whole parameter beside FSDP's that is trained: inside a machine nobody averages it."""
        if not _fsdp_modules(self.whole):
            return
        for name, param in self.whole.named_parameters():
            if param.requires_grad and param not in self._shards and name not in ignored:
                raise InvalidArgument(
                    f"parameter {name} is not sharded, beside others that are, so that each rank of a machine would "
                    "train it on its own: call fully_shard() on the whole model, too, or freeze it"
                )

    def describe(self) -> str:
        """What of the whole parameters this rank has, a line for each. It must be the same on all replicas."""
        return "\n".join(
            f"shard of parameter {name}: {tuple(param.shape)} by {param.placements}, at "
            f"{param.device_mesh.get_coordinate()} of {tuple(param.device_mesh.shape)}"
            for param, name in self._names.items()
        )

    def check_ranks(self, ranks: Collection[int]) -> None:
        """InvalidArgument if torch spreads a parameter over two of these ranks, as parts or as replicas of its own."""
        for param, name in self._names.items():
            parted = set(param.device_mesh.mesh.flatten().tolist()) & set(ranks)
            if len(parted) > 1:
                raise InvalidArgument(
                    f"parameter {name} is a DTensor on ranks {sorted(parted)}, which are to be replicas of each other: "
                    'shard the model along one dimension of the mesh, mesh["shard"], and give the other one alone, '
                    'mesh["replicate"]; a model of which there is one needs no wrapper'
                )


class Around(nn.Module):
    """A module that has another one as its `module`, as wrappers have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _fsdp_modules(whole: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    return [part for part in whole.modules() if hasattr(part, "_get_fsdp_state")]


def _fsdp_groups(whole: nn.Module) -> list[Any]:
    """FSDP's groups of parameters of a module."""
    states = [part._get_fsdp_state() for part in _fsdp_modules(whole)]
    # torch before 2.10 has one group in each module
    several = [hasattr(state, "_fsdp_param_groups") for state in states]
    found = [
        group
        for state, many in zip(states, several, strict=True)
        for group in (state._fsdp_param_groups if many else [state._fsdp_param_group])
    ]
    return [group for group in found if group is not None]


def shards_of(
    module: nn.Module,
    features: Features,
    ranks: Collection[int],
    ignored: Collection[str] = (),
    shard_group: ShardGroup | None = None,
) -> LocalShards | None:
    """What this rank has of a sharded module, whose replicas these ranks train; None for a module that is whole.

    `shard_group`: the ranks of this replica, where `ranks` are theirs. Raises InvalidArgument, with what to write, for
    a module that `features` or these ranks cannot have.
    """
    if shard_group is not None and shard_group.size > 1:
        _check_spread(module, ranks, ignored)
    if not dtensors(module):
        return None
    shards = LocalShards(module)
    features.add("sharded")
    if shard_group is None:
        shards.check_ranks(ranks)
    shards.check_complete(ignored)
    return shards


def _check_spread(module: nn.Module, ranks: Collection[int], ignored: Collection[str]) -> None:
    """InvalidArgument for a parameter that is trained and not sharded over all of a replica's ranks.

    Nobody would average its gradients over those ranks.
    """
    sharded = dtensors(module)
    for name, param in module.named_parameters():
        spread = set(sharded[name].device_mesh.mesh.flatten().tolist()) if name in sharded else set()
        if param.requires_grad and name not in ignored and spread != set(ranks):
            raise InvalidArgument(
                f"parameter {name} is not sharded over all {len(set(ranks))} ranks of the replica that the option "
                "replica names: call fully_shard() on the whole model, with a mesh of all ranks of "
                "torch.distributed, or start each worker as a replica of its own"
            )


class _Before:
    """Stands in the place of a method of one of FSDP's groups: calls `first` with the group's DTensors, and then it."""

    def __init__(self, group: Any, name: str, first: Callable[[list[Any]], None]) -> None:
        self._method, self._first = getattr(group, name), first
        self._params = [one.sharded_param for one in group.fsdp_params]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._first(self._params)
        return self._method(*args, **kwargs)


def _resolve(params: list[Any]) -> None:
    """FSDP is about to add to these DTensors' gradients, and takes DTensors alone."""
    for param in params:
        grad = raw_grad(param)
        if isinstance(grad, PendingGradient):
            grad.resolve()
