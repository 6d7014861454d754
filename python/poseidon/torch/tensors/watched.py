"""Parameters that report when they are used.

For a while, a watched parameter has another class, whose `__torch_function__` tells a watcher of the first operation
that needs its values. It does not matter who makes the operation: its own module, another one, an average of weights, a
print, `state_dict()`. Operations that only ask for metadata are answered at once.

Operations outside PyTorch's dispatch (`Function.apply`, compiled extensions) are not seen. Their caller has, as a rule,
just taken the parameter out of its module by its name, and that is seen: the module's table of parameters is replaced,
too. Code that has kept the parameter from before and uses it outside the dispatch is not noticed here.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from poseidon.torch.tensors.compatibility import leave_uncompiled

METADATA: frozenset[Any] = frozenset(
    [
        getattr(torch.Tensor, name).__get__
        for name in ["shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_sparse"]
    ]
    + [getattr(torch.Tensor, name) for name in ("dim", "numel", "size", "requires_grad_")]
)
"""What can be asked of a tensor, or set, without its values, and is the same for every memory layout."""

_PARAMETER_METADATA: frozenset[Any] = METADATA.union(
    [getattr(torch.Tensor, name).__get__ for name in ("_version", "is_leaf", "_backward_hooks")],
    [getattr(torch.Tensor, name) for name in ("stride", "is_contiguous", "is_floating_point", "element_size")],
    [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.is_floating_point],
    [torch.Tensor.requires_grad.__set__, torch.Tensor._post_accumulate_grad_hooks.__get__],  # type: ignore[attr-defined,misc]
)

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which tensors of subclasses are treated as plain ones."""

plain_grad: Any = torch.Tensor.grad
"""The attribute `.grad` of PyTorch's tensors, whatever a class makes of it."""


class Linked:
    """A parameter whose gradient another tensor shows."""

    def take_in(self) -> None:
        """Makes what stands in the `.grad` of the other one the gradient of this one, if it is not."""
        raise NotImplementedError


class Owned(Protocol):
    """A watcher's record of a watched parameter."""

    @property
    def owners(self) -> Sequence[nn.Module]:
        """The modules that have the parameter as one of their own."""


class Watcher:
    """The object that is told of uses. Each call is about parameters of `watch(param, watcher, entry)`."""

    def used(self, entries: Sequence[Any]) -> None:
        """Their values are needed now: must unwatch all of them, or raise."""

    def taken(self, entry: Any) -> None:
        """Someone has asked its module for it, by name: the values may be needed in a way that is not seen."""

    def gradient_wanted(self, entry: Any) -> None:
        """`.grad` is about to be read."""

    def gradient_replaced(self, entry: Any) -> None:
        """`.grad` has been set to something else."""


class _Watch(NamedTuple):
    """Whom a watched parameter tells of uses, and of what. It keeps nothing alive: who has the parameter owns no model.

    Python's garbage collector cannot see through autograd's references to a parameter.
    """

    watcher: weakref.ref[Any]
    entry: weakref.ref[Any]
    owners: tuple[weakref.ref[nn.Module], ...]


class Watched(nn.Parameter):
    """Mixed into the class of a parameter while it is watched."""

    _poseidon_watch: _Watch

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in _PARAMETER_METADATA:
            with without_torch_function():
                return func(*args, **kwargs)
        return _after_touch(func, args, kwargs)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if (told := _told(self)) is not None:
            told[0].gradient_wanted(told[1])
        return raw_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with without_torch_function():
            plain_grad.__set__(self, value)
        if (told := _told(self)) is not None:
            told[0].gradient_replaced(told[1])

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        touch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        touch(self)
        return self.__reduce_ex__(protocol)


@torch._disable_dynamo  # what waits for an update is not to be compiled with who uses the parameter
def _after_touch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    touch((args, kwargs))
    return func(*args, **kwargs)


class WatchedTable(dict[str, Any]):
    """The parameters of a module by name, instead of `plain`, while `watched_count` of them are watched."""

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.plain = plain
        self.watched_count = 0

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if isinstance(param, Watched) and (told := _told(param)) is not None:
            told[0].taken(told[1])
        return param

    # What the program changes meanwhile is changed in both, so that the module's own table is never behind.

    def __setitem__(self, name: str, param: Any) -> None:
        super().__setitem__(name, param)
        self.plain[name] = param

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.plain[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.plain), (dict(self),)


def own_table(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters by name, in the table that it has while none is watched."""
    table = module._parameters
    return table.plain if isinstance(table, WatchedTable) else table


def _watch_table(module: nn.Module) -> None:
    table = vars(module).get("_parameters")
    if type(table) is not WatchedTable:
        if not isinstance(table, dict):  # of a scripted module, which does not ask it
            return
        table = vars(module)["_parameters"] = WatchedTable(table)
    table.watched_count += 1


def _unwatch_table(module: nn.Module) -> None:
    table = vars(module).get("_parameters")
    if type(table) is not WatchedTable:
        return
    table.watched_count -= 1
    if not table.watched_count:
        table.plain.clear()
        table.plain.update(table)
        vars(module)["_parameters"] = table.plain


@functools.cache
def _watched_class(kind: type) -> type:
    for function in (Watched.__torch_function__.__func__, WatchedTable.__getitem__):  # type: ignore[attr-defined]
        leave_uncompiled(function)
    past: dict[str, Any] = {name: _touching(name) for name in _PAST_DISPATCH if hasattr(kind, name)}
    if hasattr(kind, _PART):
        past[_PART] = property(_part)
    return type(f"Watched{kind.__name__}", (Watched, kind), {"_poseidon_class": kind, **past})


# Methods of a DTensor that PyTorch does not ask `__torch_function__` about.
_PAST_DISPATCH = ("to_local", "full_tensor", "redistribute")
_PART = "_local_tensor"  # its attribute, which optimizers and averages of weights of other libraries use


def _part(self: Any) -> Any:
    touch(self)
    return getattr(self, _PART)


def _touching(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        touch(self)
        return getattr(self, name)(*args, **kwargs)

    return method


def watch(param: Any, watcher: Watcher, entry: Owned) -> None:
    """Tells `watcher` of the next use of `param`, the parameter of `entry`."""
    references = weakref.ref(watcher), weakref.ref(entry)
    if isinstance(param, Watched):
        if param._poseidon_watch[:2] == references:
            return
        unwatch(param)
    kind: Any = type(param)
    param.__class__ = _watched_class(kind)
    param._poseidon_watch = _Watch(*references, tuple(map(weakref.ref, entry.owners)))
    for module in entry.owners:
        _watch_table(module)


def unwatch(param: Any) -> None:
    """Gives a parameter its own class back, if it is watched."""
    if isinstance(param, Watched):
        owners = param._poseidon_watch.owners
        param.__class__ = param._poseidon_class  # type: ignore[attr-defined]
        del param._poseidon_watch
        for owner in owners:
            if (module := owner()) is not None:
                _unwatch_table(module)


def _told(param: Watched) -> tuple[Watcher, Any] | None:
    """Whom to tell of a use, and of which entry; None if the model is gone, so that nobody watches any more."""
    watcher, entry = param._poseidon_watch.watcher(), param._poseidon_watch.entry()
    if watcher is None or entry is None:
        unwatch(param)
        return None
    return watcher, entry


@contextmanager
def unnoticed(params: Iterable[Any]) -> Iterator[None]:
    """Around uses of these parameters of which nobody is to be told: watched ones have their own class meanwhile."""
    watched = [(param, type(param)) for param in params if isinstance(param, Watched)]
    for param, kind in watched:
        param.__class__ = kind._poseidon_class  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param, kind in watched:
            param.__class__ = kind


def touch(values: Any) -> None:
    """Tells the watchers of all watched parameters in `values` (nested lists, tuples and dicts) of a use."""
    found: dict[Watcher, list[Any]] = {}
    for param in list(_watched_in(values)):
        if (told := _told(param)) is not None:
            found.setdefault(told[0], []).append(told[1])
    for watcher, entries in found.items():
        watcher.used(entries)


def _watched_in(value: Any) -> Iterable[Watched]:
    if isinstance(value, Watched):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _watched_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _watched_in(part)


def raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """What `.grad` holds, without telling anybody."""
    if isinstance(param, Linked):
        param.take_in()
    with without_torch_function():
        return plain_grad.__get__(param)  # type: ignore[no-any-return]
