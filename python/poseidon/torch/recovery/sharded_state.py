"""States with DTensors as plain data, which the same shard of another replica can take over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.model.shards import dtensors
from poseidon.torch.tensors.shard import is_dtensor, kind_of, local_part

_LAYOUT = "DTensor laid out as"
_FIELDS = {_LAYOUT, "shape", "stride", "part"}


class Layouts:
    """How DTensors of some models lie on the ranks of a replica: the same list on the same shard of every replica."""

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        found = [param for model in models for param in dtensors(model.module).values()]
        self._kind = kind_of(found[0]) if found else None
        self._known = list(dict.fromkeys((param.device_mesh, tuple(param.placements)) for param in found))

    def plain(self, state: Any) -> Any:
        """The state with this rank's parts in place of DTensors. InvalidArgument for one that lies otherwise."""
        return _mapped(state, self._part) if self._known else state

    def whole(self, state: Any) -> Any:
        """What `plain` was made of."""
        return _mapped(state, self._dtensor) if self._known else state

    def _part(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and is_dtensor(value)):
            return None
        whole: Any = value
        layout = (whole.device_mesh, tuple(whole.placements))
        if layout not in self._known:
            raise InvalidArgument(
                f"Recovery was given an object whose state has a DTensor with placements {layout[1]}, as no parameter "
                "of the models has: a replacement could not take it over"
            )
        shape, stride = list(whole.shape), list(whole.stride())
        return {_LAYOUT: self._known.index(layout), "shape": shape, "stride": stride, "part": local_part(whole)}

    def _dtensor(self, value: Any) -> Any:
        if not (isinstance(value, dict) and value.keys() == _FIELDS):
            return None
        assert self._kind is not None
        mesh, placements = self._known[value[_LAYOUT]]
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        part = value["part"].to(mesh.device_type)
        return self._kind.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of plain data in which `change` has replaced what it does not return None for. The rest stays as it is."""
    if (changed := change(value)) is not None:
        return changed
    if isinstance(value, dict):
        parts = {key: _mapped(one, change) for key, one in value.items()}
        return parts if any(parts[key] is not one for key, one in value.items()) else value
    if isinstance(value, (list, tuple)):
        found = [_mapped(one, change) for one in value]
        same = all(map(is_, found, value))
        return value if same else found if isinstance(value, list) else tuple(found)
    return value
