"""Replaces torch's DistributedDataParallel by Poseidon's, for programs that are written for torch's class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from torch.nn.parallel.distributed import DistributedDataParallel as TorchsClass

from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel

# torch's replicate() wraps modules by its class, too.
_COMPOSABLE = "torch.distributed._composable.replicate"
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed", _COMPOSABLE)
_KNOW_BOTH = ("torch", "poseidon")  # torch asks whether a model is of its class, which Poseidon's is derived from

Restore = Callable[[], None]


def replace_ddp() -> Restore:
    """Makes torch.nn.parallel.DistributedDataParallel Poseidon's class, and returns a function that undoes it.

    This includes modules that have imported the class before, and processes that `multiprocessing` spawns. Further
    calls have no effect. Raises InvalidArgument, naming the class, if a class is already derived from torch's, because
    that class would stay torch's.
    """
    with suppress(ImportError):
        importlib.import_module(_COMPOSABLE)
    for derived in TorchsClass.__subclasses__():
        if not _is_of(_KNOW_BOTH, derived.__module__):
            raise InvalidArgument(
                f"{derived.__module__}.{derived.__qualname__} is derived from torch's DistributedDataParallel already: "
                "call replace_ddp() before that module is imported"
            )
    replaced = [(module, name) for module in list(sys.modules.values()) for name in _names_of_torchs(module)]
    for module, name in replaced:
        setattr(module, name, DistributedDataParallel)
    restore_spawned = _replace_in_spawned()

    def restore() -> None:
        for module, name in replaced:
            setattr(module, name, TorchsClass)
        restore_spawned()

    return restore


def _is_of(packages: Collection[str], module_name: str) -> bool:
    return module_name.split(".")[0] in packages


def _names_of_torchs(module: Any) -> list[str]:
    if not isinstance(module, ModuleType):
        return []
    if _is_of(_KNOW_BOTH, module.__name__) and module.__name__ not in _PUBLIC:
        return []
    return [name for name, value in list(vars(module).items()) if value is TorchsClass]


class _Replacement:
    """A spawned process unpickles this before it imports the program, and then replaces the class, too."""

    def __reduce__(self) -> tuple[Callable[[], Restore], tuple[()]]:
        return replace_ddp, ()


def _replace_in_spawned() -> Restore:
    inner = spawn.get_preparation_data
    if inner.__module__ == __name__:
        return lambda: None

    def with_replacement(name: str) -> dict[str, Any]:
        return {**inner(name), "poseidon": _Replacement()}

    def restore() -> None:
        spawn.get_preparation_data = inner

    spawn.get_preparation_data = with_replacement
    return restore
