"""The end of a backward pass, which for autograd may be inside another one.

A re-entrant checkpoint, or any function that calls backward() in its own backward, runs a graph task inside that of the
program's backward(). Autograd calls the callbacks of a graph task at its end, also of such an inner one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def in_compiled_backward() -> bool:
    """Whether torch's compiled autograd runs hooks now. It calls no callbacks at the end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


class BackwardEnd:
    """Calls `finish` once, at the end of the outermost backward pass that runs now.

    `began_in` is the node of the graph inside which that pass has begun, for autograd; None: outside of all.
    `postponed` is called at the end of each inner one. Autograd drops the object uncalled when backward fails.
    """

    def __init__(self, finish: Callable[[], None], began_in: Any, postponed: Callable[[], None]) -> None:
        self._finish = finish
        self._began_in = began_in
        self._postponed = postponed

    def await_end(self) -> None:
        """Waits for the end of the graph task that runs now."""
        torch.autograd.Variable._execution_engine.queue_callback(self)  # type: ignore[attr-defined]

    @torch._disable_dynamo
    def __call__(self) -> None:
        # The node that has called this inner backward; none at the end of the outermost.
        around = torch._C._current_autograd_node()
        if around is None or around is self._began_in:
            self._finish()
            return
        self._postponed()
        # Only code that runs in the outer graph task can reach it; the nodes that follow do, each of them.
        handles: list[Any] = []
        for node, _ in around.next_functions:
            if node is not None:
                handles.append(node.register_prehook(partial(_await_outer_end, self, handles)))


@torch._disable_dynamo
def _await_outer_end(end: BackwardEnd, handles: list[Any], *_: Any) -> None:
    for handle in handles:
        handle.remove()
    end.await_end()


_RUN = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


def caller_of_backward() -> int:
    """The `threading.get_ident()` of the thread for whose backward() the present one works.

    0 if that is the present one itself, or if it is not known: there are several, or it is no Python thread.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return 0  # Python has made this thread, or it is the main thread
    own = threading.get_ident()
    waiting = [ident for ident, top in sys._current_frames().items() if ident != own and top.f_code is _RUN]
    return waiting[0] if len(waiting) == 1 else 0
