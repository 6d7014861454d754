"""Threads of autograd's own.

Backward on a GPU, and a backward inside some sixty others, runs in a thread of autograd's. The thread that has called
backward() waits for it.
"""

from __future__ import annotations

import sys
import threading

import torch

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
