"""Notices changes of a model after it was wrapped, because of which parameters would train unsynchronized.

torch's class does not check this: a parameter that is unfrozen, added or replaced later gets each rank's own gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NoReturn

import torch
from torch import nn

from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.ownership import first_overlap
from poseidon.torch.tensors.watched import own_table, without_torch_function

_kind_of = attrgetter("dtype", "device", "shape")
_tensor_of: Callable[[Any], int] = attrgetter("_cdata")  # where torch keeps what a Python object stands for
_INSIDE = "module."  # with which the names of the module's parameters begin in the wrapper
_AGAIN = "make the change before wrapping, or wrap the module again, on all ranks"


class ChangeWatch:
    """A wrapper, and the module in it, as they were in the beginning. A look takes about 0.2 µs for each parameter and
    module.

    `is_synced` says whether another model exchanges the gradients of a parameter. Only an attribute of the wrapper may
    have such ones, since this model's forward pass would use them past their own wrapper.
    """

    def __init__(
        self,
        wrapper: nn.Module,
        entries: Sequence[SyncedParameter],
        ignored: Collection[str],
        is_synced: Callable[[nn.Parameter], bool],
    ) -> None:
        self._wrapper = weakref.ref(wrapper)  # which owns this
        self._entries = entries
        self._is_synced = is_synced
        self._ignored_names = ignored
        # Their names are others in a module that torch.compile has made of this one.
        self._ignored = {param for name, param in self._parameters() if name.removeprefix(_INSIDE) in ignored}
        self._module = wrapper.get_submodule("module")
        kinds: dict[Any, Any] = {}  # few: thousands of equal ones would give Python's garbage collector work
        self._synced = {
            entry.param: kinds.setdefault(kind, kind) for entry in entries for kind in [_kind_of(entry.param)]
        }
        self._kinds = list(self._synced.values())
        self._tensors = list(map(_tensor_of, self._synced))
        self._looks = 0
        self._remember()

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []  # of modules and of parameters by name
        self._held: list[list[Any]] = []  # by them
        self._empty: list[dict[str, Any]] = []  # further such tables
        self._frozen: dict[nn.Parameter, None] = {}  # a set that keeps the order
        for part in self._parts():
            for table in (part._modules, own_table(part)):
                if table:
                    self._tables.append(table)
                    self._held.append(list(table.values()))
                elif type(table) is dict:
                    self._empty.append(table)
        for name, param in self._parameters():
            if param not in self._synced and not self._is_ignored(name, param) and not param.requires_grad:
                self._frozen[param] = None

    def _parts(self) -> Iterator[nn.Module]:
        wrapper = self._wrapper()
        return iter(()) if wrapper is None else wrapper.modules()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are not empty. Tensors that functional_call lends the module belong to whoever lends them."""
        wrapper = self._wrapper()
        for name, param in () if wrapper is None else wrapper.named_parameters():
            if isinstance(param, nn.Parameter) and param.numel() > 0:
                yield name, param

    def _is_ignored(self, name: str, param: nn.Parameter) -> bool:
        return name.removeprefix(_INSIDE) in self._ignored_names or param in self._ignored

    def check(self) -> None:
        """InvalidArgument naming a parameter that would be trained without the other ranks."""
        with without_torch_function():
            if any(map(len, self._empty)) or not all(map(_holds, self._tables, self._held)):
                self._check_new()
                self._remember()
            for param in self._frozen:
                if param.requires_grad:
                    raise InvalidArgument(
                        f"parameter {self._name_of(param)} requires a gradient now and did not when the module was "
                        f"wrapped, so that each rank would train it alone: {_AGAIN}"
                    )
            if list(map(_kind_of, self._synced)) != self._kinds:
                param, was = next((param, was) for param, was in self._synced.items() if _kind_of(param) != was)
                raise InvalidArgument(
                    f"parameter {self._name_of(param)} has become {_what(*_kind_of(param))}, and was {_what(*was)} "
                    f"when the module was wrapped: {_AGAIN}"
                )
            if self._tensors != list(map(_tensor_of, self._synced)):
                self._refuse_swapped()
            # One of them, by turns: it takes longer, and what is converted is the whole model or a part of it.
            if self._entries:
                self.check_heard([self._entries[self._looks % len(self._entries)]])
                self._looks += 1
            self._check_stored()

    def check_heard(self, entries: Iterable[SyncedParameter]) -> None:
        """InvalidArgument if a backward pass would tell nobody of the gradient of one of these."""
        for entry in entries:
            if not entry.is_heard():
                raise InvalidArgument(
                    f"parameter {self._name_of(entry.param)} has lost its gradient hooks, because it was converted to "
                    "another dtype or device and back after the module was wrapped, so that each rank would train it "
                    f"alone: convert a copy (copy.deepcopy(model.module)), or {_AGAIN}"
                )

    def _check_stored(self) -> None:
        """The servers update each parameter on its own. InvalidArgument if two have come to lie in the same memory."""
        overlap = first_overlap([entry.param for entry in self._entries if entry.on_servers])
        if overlap is not None:
            raise InvalidArgument(
                f"parameters {' and '.join(map(self._name_of, overlap))} share memory since the DistributedOptimizer "
                "was made, and the servers update each on its own: give each its own memory, or make the two one "
                "parameter before wrapping"
            )

    def _check_new(self) -> None:
        for name, param in self._parameters():
            known = param in self._synced or param in self._frozen or self._is_ignored(name, param)
            elsewhere = not name.startswith(_INSIDE) and self._is_synced(param)
            if not known and param.requires_grad and not elsewhere:
                raise InvalidArgument(
                    f"parameter {name.removeprefix(_INSIDE)} was put into the model after it was wrapped, so that each "
                    f"rank would train it alone: {_AGAIN}; or call requires_grad_(False) if nobody trains it, as an "
                    "average of the model"
                )
        self._check_replaced()

    def _check_replaced(self) -> None:
        """The buffers that ranks share are those of the module of the beginning."""
        wrapper = self._wrapper()
        if wrapper is None or (module := wrapper.get_submodule("module")) is self._module:
            return
        known = set(map(id, self._module.buffers()))
        for name, buffer in module.named_buffers():
            if id(buffer) not in known:
                raise InvalidArgument(
                    f"the module in the wrapper was replaced by another one, whose buffer {name} would differ from "
                    f"rank to rank: {_AGAIN}"
                )

    def _refuse_swapped(self) -> NoReturn:
        """What autograd knows of the tensor has gone with it: a backward pass would tell nobody of the gradient."""
        swapped = next(
            param for param, was in zip(self._synced, self._tensors, strict=True) if _tensor_of(param) != was
        )
        raise InvalidArgument(
            f"parameter {self._name_of(swapped)} has become another tensor since the module was wrapped, as "
            "torch.utils.swap_tensors makes it, and load_state_dict() after "
            f"torch.__future__.set_swap_module_params_on_conversion(True), so that each rank would train it alone: "
            f"{_AGAIN}"
        )

    def _name_of(self, wanted: torch.Tensor) -> str:
        names = (name for name, param in self._parameters() if param is wanted)
        return next(names, "no longer its own").removeprefix(_INSIDE)


def _holds(table: dict, held: list) -> bool:  # type: ignore[type-arg]
    """Whether the table has these very objects. Not `==`, which tensors answer element by element."""
    return len(table) == len(held) and all(map(is_, table.values(), held))


def _what(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
