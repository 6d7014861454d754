"""What must be the same on all ranks in every step, such as learning rates: compared while gradients are exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from poseidon.adapter.control import Control
from poseidon.errors import Mismatch

_BITS = 31  # of a digest, so that one rank's square has no more than 62
_WRAP = 1 << 64


class Compared(Protocol):
    """Something of which all ranks must have the same."""

    def digest(self) -> bytes:
        """Equal on two ranks iff what it is made of is. Cheap, since it is asked in every step."""

    def sent(self) -> None:
        """The last digest has been sent: what is counted from exchange to exchange starts again."""

    def lines(self) -> list[str]:
        """What the last digest was made of, in the same order on all ranks: lines of a name, a tab and a value."""


class StepCheck:
    """Compares `Compared` objects in each exchange of one model. Nobody waits for it.

    Each rank sends a digest with the exchange, and looks at the sum at the end of that exchange or when the next one
    begins. All ranks see the same sum, so all or none then exchange what differs. Use it from the thread that trains.
    """

    def __init__(self, enabled: bool) -> None:
        self.before: Callable[[], None] | None = None  # this rank begins an exchange
        self._enabled = enabled  # not where ranks may be in different steps
        self._compared: list[Compared] = []
        self._control: Control | None = None
        self._sums: Callable[[], list[int]] | None = None  # what waits for those of the exchange that began last

    def connect(self, control: Control) -> None:
        """The job's ranks are those of `control` now. What was sent to others is past."""
        self._control, self._sums = control, None

    def add(self, compared: Compared) -> None:
        """From the next exchange on, this is compared, too. Collective, but it waits for nobody."""
        if self._enabled:
            self._compared.append(compared)

    def remove(self, compared: Compared) -> None:
        """Not any more."""
        if compared in self._compared:
            self._compared.remove(compared)

    def begin(self, contributes: bool = True) -> None:
        """An exchange begins. Not `contributes`: this rank only takes part in one of the others.

        Raises what `end` raises for the last one.
        """
        self.end()
        if contributes and self.before is not None:
            self.before()
        if self._control is None or not self._compared:
            return
        digest = hashlib.blake2b(b"".join(one.digest() for one in self._compared), digest_size=4).digest()
        number = int.from_bytes(digest, "little") >> (32 - _BITS)
        self._sums = self._control.start_sum([1, number, number * number] if contributes else [0, 0, 0])
        for one in self._compared if contributes else ():
            one.sent()

    def end(self) -> None:
        """Raises Mismatch on all ranks, naming what differs, if it did so in the exchange that began last."""
        if self._sums is None:
            return
        sums, self._sums = self._sums, None
        count, total, squares = sums()
        # Σ (a − b)² over all pairs of ranks
        if (count * squares - total * total) % _WRAP == 0:
            return
        assert self._control is not None
        texts = self._control.texts_if_different("\n".join(line for one in self._compared for line in one.lines()))
        raise Mismatch(_difference([] if texts is None else [text.split("\n") for text in texts]))


def _difference(ranks: Sequence[Sequence[str]]) -> str:
    advice = (
        "change it on all ranks alike and at the same step, e.g. give a scheduler that looks at a loss the mean over "
        "the ranks"
    )
    for lines in zip(*ranks, strict=False):
        if len(set(lines)) > 1:
            what = lines[0].partition("\t")[0]
            values: dict[str, list[str]] = {}
            for rank, line in enumerate(lines):
                values.setdefault(line.partition("\t")[2], []).append(str(rank))
            found = ", ".join(f"{value} on {_ranks(on)}" for value, on in values.items())
            return f"the ranks differ in {what}: {found}; {advice}"
    return f"the ranks' optimizers differed in the last step, and do so no more; {advice}"


def _ranks(numbers: Sequence[str]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"
