"""Which package of Lightning a program uses."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from poseidon.errors import InvalidArgument

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def imported_package() -> str:
    """The package whose Trainer the program probably uses."""
    loaded = [package for name, package in _PACKAGES.items() if package in sys.modules]
    if loaded:
        return loaded[0]
    installed = [package for name, package in _PACKAGES.items() if find_spec(name) is not None]
    if not installed:
        raise InvalidArgument("poseidon.torch.lightning needs Lightning: pip install lightning")
    return installed[0]
