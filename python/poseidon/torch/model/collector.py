"""Python's garbage collector, where a model of thousands of parameters is wrapped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """While many objects are made that stay, and nobody waits for anything.

    The collector would go through all objects of the process meanwhile, several times, and find that they are needed.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
