"""An empty torchvision, for machines without it: timm imports it for images and data sets that its models do not need.

Every name of it is a class that raises when it is made. It goes on PYTHONPATH only where torchvision is missing.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch import nn

__version__ = "0.0.0"


class _Named(type):
    """An enumeration's members are asked of the class: their names do."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Missing(nn.Module, metaclass=_Named):
    def __init__(self, *_: object, **__: object) -> None:
        raise ImportError(f"torchvision is not installed, and {type(self).__name__} is part of it")


def __getattr__(name: str) -> type[_Missing]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Named(name, (_Missing,), {})


class _Finder(MetaPathFinder, Loader):
    """Makes each module under torchvision, with the same answer for every name."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.append(_Finder())
