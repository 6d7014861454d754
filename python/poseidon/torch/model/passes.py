"""Decides which backward passes exchange gradients: those of passes through the wrapper, outside `no_sync()`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch.nn.parallel.distributed import _find_tensors

_MOST_OBJECTS = 1000  # of an output in which tensors are looked for
_WITHOUT_TENSORS = (str, bytes, int, float, complex, type(None), type, torch.nn.Module)


class Mode(Enum):
    """What a backward pass does with the gradients of a wrapped model."""

    OTHERS = 0  # of a forward pass that went past the wrapper: as torch's class, it leaves them alone
    LOCAL = 1  # accumulates them on this rank (`no_sync()`)
    EXCHANGED = 2


class Passes:
    """The forward passes of one model, and the mode of the backward pass that runs now.

    A backward pass belongs to the outputs that it reaches. It may reach none, because the loss was not made of them, or
    because nobody could find them. Then the last forward pass counts, until a backward pass has exchanged gradients.
    Whoever demands an exchange of the next backward pass gets it.
    """

    def __init__(self) -> None:
        self.armed = False  # a forward pass waits for its backward
        self.exchange_count = 0  # of backward passes that exchanged gradients
        self.began_ns = 0  # the forward pass that began last
        self._synchronizing = True  # that one
        self._rows: int | None = None  # the weight that it was given
        self._unseen: tuple[int | None] | None = None  # the weight of a pass whose output has no tensor that is found
        # Told of a pass with another weight than the last one: both weights, and whether autograd has reached it.
        self.unlike: Callable[[int | None, int | None, bool], None] = _tell_nobody
        self.began_in: Any = None  # the node of autograd's whose backward has run it; None: it ran outside of all
        self._reached: bool | None = None  # by the backward pass that runs: whether a synchronizing one
        self._demanded = False  # the next backward pass exchanges gradients, whatever it reaches
        self._task = -1  # autograd's number of that pass
        self._nests = False  # backward passes have run inside others

    def begin(self, synchronizing: bool) -> None:
        """A forward pass begins, or a backward pass is to come that counts as one's."""
        self.armed, self._synchronizing, self._reached = True, synchronizing, None
        self.began_ns = time.monotonic_ns()
        self.began_in = torch._C._current_autograd_node()

    def demand(self) -> None:
        """The next backward pass exchanges gradients, whichever forward passes it belongs to."""
        self.begin(synchronizing=True)
        self._demanded = True

    def end(self, output: Any, rows: int | None = None) -> None:
        """The forward pass that began last has returned this. `rows`: the weight that counts for its gradients."""
        self._rows = rows
        if self._unseen is not None and self._unseen != (rows,):
            self.unlike(*self._unseen, rows, False)
        reach = partial(_reach, weakref.ref(self), self._synchronizing, rows)
        tensors = list(_find_tensors(output)) + (_hidden_tensors(output) if rows is not None else [])
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(reach)
        if not nodes and self.armed:
            self._unseen = (rows,)

    def reach(self, synchronizing: bool, rows: int | None) -> None:
        """The backward pass that runs now is one of a forward pass of this kind, with this weight."""
        if rows != self._rows:
            self.unlike(rows, self._rows, True)
        if self._reached is None:
            self._task = torch._C._current_graph_task_id()
            over = partial(_over, weakref.ref(self))
            torch.autograd.Variable._execution_engine.queue_callback(over)  # type: ignore[attr-defined]
        self._reached = synchronizing or bool(self._reached)

    def over(self) -> None:
        """The backward pass that has run is over."""
        self._reached = None

    def note_nested(self) -> None:
        """A backward pass inside another one is over."""
        self._nests = True

    @property
    def nested(self) -> bool:
        """Whether the backward pass that runs now is inside another one, or, where that cannot be known, may be."""
        if self._reached is None:
            return self._nests
        return torch._C._current_graph_task_id() != self._task

    @property
    def mode(self) -> Mode:
        """What the backward pass that runs now does. Of one that fails it may stay until the next forward pass."""
        if self._demanded:
            return Mode.EXCHANGED
        if self._reached is not None:
            return Mode.EXCHANGED if self._reached else Mode.LOCAL
        if not self.armed:
            return Mode.OTHERS
        return Mode.EXCHANGED if self._synchronizing else Mode.LOCAL

    def exchanged(self) -> None:
        """A backward pass that exchanged gradients is over."""
        self.armed, self._demanded, self.began_in, self._unseen = False, False, None, None
        self.exchange_count += 1

    @property
    def awaits_exchange(self) -> bool:
        """Whether a forward pass waits for a backward pass that is to exchange gradients."""
        return self.armed and self._synchronizing


def _hidden_tensors(output: Any) -> list[torch.Tensor]:
    """What is found also in objects of the program's own, into which torch's class does not look; some, if many are."""
    found: list[torch.Tensor] = []
    waiting = [output]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif id(one) not in seen and not isinstance(one, _WITHOUT_TENSORS):
            seen.add(id(one))
            if isinstance(one, Mapping):
                waiting += one.values()
            elif isinstance(one, (list, tuple, set, frozenset)):
                waiting += one
            else:
                waiting += [*getattr(one, "__dict__", {}).values(), *_slots_of(one)]
    return found


def _slots_of(one: Any) -> Iterator[Any]:
    for kind in type(one).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            yield getattr(one, name, None)


def _tell_nobody(_one: int | None, _last: int | None, _reached: bool) -> None:
    """Nobody has given a weight."""


# What autograd calls. Not closures: one that is new in every step would be made known to torch.compile in every step.


@torch._disable_dynamo
def _reach(reference: weakref.ref[Passes], synchronizing: bool, rows: int | None, *_: Any) -> None:
    if (passes := reference()) is not None:
        passes.reach(synchronizing, rows)


@torch._disable_dynamo
def _over(reference: weakref.ref[Passes]) -> None:
    if (passes := reference()) is not None:
        passes.over()
