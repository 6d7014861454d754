"""The check that all ranks have the same parameters, by a digest of them.

All ranks begin a step together. Then the updates of the step before are complete, and each rank takes a digest of its
parameters. The sum of the ranks' digests, which nobody waits for, says at the next look whether they are equal. Only if
they are not, the ranks exchange the digests of the single parameters, and where they compute differently the values.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.errors import Mismatch, PoseidonError
from poseidon.options import Settings

_FIRST_STEPS = (2, 10)
_FIRST_AVERAGES = (1, 2)
_SHARE = 0.0005  # of the run's time; half of what the option promises, since the ranks take the mean of their wishes
_LEAST_GAP = 10
_MOST_GAP = 1 << 30
_DIGEST_BYTES = 6  # so that the sum over the ranks of a job fits into 64 bits
_EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_MOST_ROUNDING = 1e-3  # what many steps may add up to, in parts of the largest value of a parameter
_MOST_NAMED = 8
_MOST_UNCONFIRMED = 3  # steps without an update, such as those that GradScaler leaves out

_CAUSES = (
    "Usual causes: parameters or the optimizer's state were loaded on one rank alone, a scheduler or a search has "
    "followed this rank's own loss (average it over the ranks first), a parameter was changed outside the optimizer, "
    "or an optimizer with a state went through an uneven join(). Do the same on every rank, or call broadcast() "
    "after the change. replica_check=off leaves this check out"
)


class Parameters(Protocol):
    """The parameters of one model, as the check looks at them. All ranks have the same ones in the same order."""

    def names(self) -> list[str]:
        """Their names."""

    def wait(self) -> None:
        """Waits for what a device computes before the digests, which is not their cost."""

    def digests(self) -> list[int]:
        """A 64-bit digest of the present value of each."""

    def values(self, index: int) -> tuple[str, NDArray[np.float64]]:
        """The dtype of one of them, and its present values in one dimension."""

    def surroundings(self) -> str:
        """What the last bits of an update may depend on: processor, device, versions."""


class HostParameters(Parameters):
    """Parameters that lie in host memory, as NumPy's arrays."""

    def __init__(self, names: Sequence[str], arrays: Sequence[NDArray[Any]], versions: str) -> None:
        self._names, self._arrays, self._versions = list(names), arrays, versions

    def names(self) -> list[str]:
        return self._names

    def wait(self) -> None:
        pass

    def digests(self) -> list[int]:
        return [_core.digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8)) for array in self._arrays]

    def values(self, index: int) -> tuple[str, NDArray[np.float64]]:
        array = self._arrays[index]
        return array.dtype.name, array.astype(np.float64).reshape(-1)

    def surroundings(self) -> str:
        return f"{processor_name()}, {self._versions}"


class ReplicaCheck:
    """The check of one model. Collective: all ranks make the same calls, from the thread that trains.

    `of_averages`: what it counts are no steps but averages of the ranks' parameters, which are rare.
    """

    def __init__(self, settings: Settings, of_averages: bool = False) -> None:
        self._every = settings.replica_check
        self._first = _FIRST_AVERAGES if of_averages else _FIRST_STEPS
        self._least_gap = 1 if of_averages else _LEAST_GAP
        self._what = "average" if of_averages else "step"
        self._warned = False
        self.confirms: Callable[[], bool] = lambda: False  # whether `updated` will be called
        self._suspicion, self._at_update = "", False  # of a model that was refused before it was connected

    def connect(self, control: Control) -> None:
        """Begins anew among the ranks of `control`. Collective."""
        self._control = control
        self._slot = control.new_slot("replicas")  # compiled steps of two models may begin in any order
        control.prepare_sum(2, self._slot)  # now: steps may begin on a thread of the framework
        self._begun = 0  # steps
        self._next = self._first[0] if self._every == "auto" else self._every
        self._awaited: _Awaited | None = None
        self._difference = ""
        # A rank that takes a lost one's place knows nothing of these, so nobody may.
        self._suspicion = ""  # of what a step began with, until the next update
        self._unconfirmed = 0  # steps since
        self._at_update = False  # programs such as SAM begin steps with parameters of each rank's own
        self._last_equal = 0
        self._spent_s = 0.0
        self._began_s = self._last_s = time.monotonic()
        self._last = 0  # the step after which parameters were compared

    @property
    def awaits(self) -> bool:
        """Whether a comparison is under way."""
        return self._awaited is not None

    @property
    def is_due(self) -> bool:
        """Whether the next `begin_step` looks at the parameters."""
        return self._awaited is not None or self._begun == self._next

    def begin_step(self, parameters: Parameters, begun: int | None = None) -> int:
        """A step begins, and all updates of the step before are made. Raises as `look` does, now and ever after.

        `begun`: how many have begun before, where not every one comes here. Returns the number of the next one that has
        to.
        """
        if self._difference:
            raise Mismatch(self._difference)
        self.look(parameters)
        if self._suspicion:
            self._unconfirmed += 1
            if self._unconfirmed == _MOST_UNCONFIRMED:
                raise self._failed(self._suspicion)
        completed = self._begun if begun is None else begun
        self._begun = completed + 1
        if completed == 0:
            self._began_s = self._last_s = time.monotonic()
        if completed == self._next and not self._at_update:
            self._take(parameters, completed)
        return self._next if self._awaited is None else self._begun

    @property
    def wants_update(self) -> bool:
        """Whether the next `updated` looks at the parameters."""
        return bool(self._suspicion) or (self._at_update and self._awaited is None and self._begun >= self._next)

    def updated(self, parameters: Parameters) -> None:
        """An optimizer has updated the parameters. Raises Mismatch on all ranks if they differ now, too."""
        if not self._suspicion:
            self._take(parameters, self._begun)
            return
        suspicion, self._suspicion = self._suspicion, ""
        parameters.wait()
        _, digest = _digests(parameters)
        if self._control.sum([digest])[0] != self._control.world_size * digest:
            raise self._failed(suspicion)
        self._at_update = True

    def _take(self, parameters: Parameters, completed: int) -> None:
        parameters.wait()
        began_s = time.monotonic()
        digests, digest = _digests(parameters)
        now_s = time.monotonic()
        self._spent_s += now_s - began_s
        gap = self._gap(completed, now_s)
        result = self._control.start_sum([digest, gap], self._slot)
        self._awaited = _Awaited(self._what, completed, parameters.names(), digests, digest, result)
        self._last, self._last_s = completed, now_s

    def _gap(self, completed: int, now_s: float) -> int:
        """Steps until this rank would compare again."""
        if self._every != "auto":
            return int(self._every)
        later = [step for step in self._first if step > completed]
        if later:
            return later[0] - completed
        step_s = (now_s - self._last_s) / max(1, completed - self._last)
        wait_s = self._spent_s / _SHARE - (now_s - self._began_s)
        return min(max(math.ceil(wait_s / max(step_s, 1e-9)), self._least_gap), _MOST_GAP)

    def look(self, parameters: Parameters) -> None:
        """Ends the comparison that is under way, if there is one. Raises Mismatch on all ranks if it fails."""
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return
        total, gaps = awaited.result()
        size = self._control.world_size
        self._next = awaited.completed + -(-gaps // size)
        # Whoever has the mean of other digests by chance, one rank of many, would wait for a message of the others.
        if total == size * awaited.digest:
            self._last_equal = awaited.completed
            return
        began_s = time.monotonic()
        self._judge(awaited, parameters)
        self._spent_s += time.monotonic() - began_s

    def _judge(self, awaited: _Awaited, parameters: Parameters) -> None:
        """The digests differ: raises Mismatch, or warns if the ranks round differently and nothing else differs."""
        control = self._control
        others = control.texts_if_different("\n".join(awaited.names))
        if others is not None:
            raise self._failed(
                f"the ranks' models have different parameters after {awaited.when}: change the model in the "
                "same way on every rank"
            )
        rows = control.gather(awaited.digests.view(np.uint8)).view(np.uint64)
        differing = [int(index) for index in np.flatnonzero((rows != rows[0]).any(axis=0))]
        surroundings = control.texts_if_different(parameters.surroundings())
        if surroundings is not None and self._is_rounding(differing, parameters, awaited.completed):
            if not self._warned:
                warnings.warn(_rounding_text(awaited, differing, surroundings), stacklevel=2)
            self._warned = True
            return
        text = _difference_text(awaited, differing, rows, self._last_equal)
        if not self.confirms():
            raise self._failed(text)
        # A program may change what a step begins with on each rank, and take that back before the update.
        self._suspicion, self._unconfirmed = text, 0

    def _failed(self, text: str) -> Mismatch:
        with contextlib.suppress(PoseidonError):
            self._control.barrier()  # nobody ends, which would be an error of its own, before all know
        self._difference = text
        return Mismatch(text)

    def _is_rounding(self, differing: Sequence[int], parameters: Parameters, completed: int) -> bool:
        """Whether all ranks are as close to rank 0 as arithmetic that rounds differently makes them. Collective."""
        is_close = True
        for index in differing:
            dtype, own = parameters.values(index)
            first = own.copy()
            self._control.broadcast_bytes(first.view(np.uint8), 0)
            most = min(_EPSILONS.get(dtype, 0.0) * (16 + 4 * completed), _MOST_ROUNDING)
            is_close = is_close and _are_close(own, first, most)
        return self._control.sum([int(not is_close)])[0] == 0


def _digests(parameters: Parameters) -> tuple[NDArray[np.uint64], int]:
    """Those of the single parameters, and that of all."""
    digests = np.array(parameters.digests(), np.uint64)
    return digests, int.from_bytes(hashlib.blake2b(digests.tobytes(), digest_size=_DIGEST_BYTES).digest(), "little")


@dataclass(frozen=True)
class _Awaited:
    """A comparison under way: of the parameters after `completed` times `what`."""

    what: str
    completed: int
    names: list[str]
    digests: NDArray[np.uint64]
    digest: int
    result: Callable[[], list[int]]

    @property
    def when(self) -> str:
        return f"{self.what} {self.completed}"


def replica_check(settings: Settings, features: Features, of_averages: bool = False) -> ReplicaCheck | None:
    """The check that the option asks for. None if it is off, and where ranks may be at different steps."""
    if settings.world_size < 2 or settings.replica_check == "off" or not features.keeps(SAME_STEP):
        return None
    return ReplicaCheck(settings, of_averages)


def processor_name() -> str:
    """The processor's architecture, and its name if the system gives one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return " ".join((platform.machine(), *itertools.islice(names, 1)))


def _are_close(own: NDArray[np.float64], first: NDArray[np.float64], most: float) -> bool:
    finite = np.isfinite(first)
    if not np.array_equal(finite, np.isfinite(own)) or not finite.any():
        return False
    largest = np.abs(first[finite]).max()
    return bool(np.abs(own[finite] - first[finite]).max() <= most * largest)


def _rounding_text(awaited: _Awaited, differing: Sequence[int], surroundings: Sequence[str]) -> str:
    rank = next(rank for rank, text in enumerate(surroundings) if text != surroundings[0])
    return (
        f"after {awaited.when} the ranks' parameters are equal but for rounding (parameter "
        f"{awaited.names[differing[0]]} is the first of {_count(awaited, differing)}), because the ranks "
        f"compute differently: rank 0 on {surroundings[0]}, rank {rank} on {surroundings[rank]}. For equal bits use "
        "equal machines and versions; in PyTorch, update='server' gives equal bits on different machines, too"
    )


def _difference_text(awaited: _Awaited, differing: Sequence[int], rows: NDArray[np.uint64], last_equal: int) -> str:
    column = rows[:, differing[0]].tolist()
    groups: dict[int, list[int]] = {}
    for rank, digest in enumerate(column):
        groups.setdefault(digest, []).append(rank)
    parties = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    who = " and ".join(map(_ranks, parties)) if len(parties) <= 3 else f"{len(parties)} groups of ranks"
    if len(parties) == 2 and len(parties[0]) < len(parties[1]):
        who = f"{_ranks(parties[0])} and on the others"
    since = f"They were equal after {awaited.what} {last_equal}. " if last_equal else ""
    return (
        f"the replicas differ after {awaited.when}: parameter {awaited.names[differing[0]]} has not the same "
        f"values on {who}; it is the first of {_count(awaited, differing)}. {since}{_CAUSES}"
    )


def _count(awaited: _Awaited, differing: Sequence[int]) -> str:
    return f"{len(differing)} of {len(awaited.names)} parameters that differ"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (
        f" and {len(ranks) - _MOST_NAMED} more" * (len(ranks) > _MOST_NAMED)
    )
    return f"rank{'s' * (len(ranks) > 1)} {named}"
