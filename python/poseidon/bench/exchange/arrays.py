"""The arrays that one worker exchanges, and the known values by which an exchange is checked."""

from __future__ import annotations

import numpy as np

from poseidon.errors import PoseidonError
from poseidon.gradients.fill import Stock

_ALIGNMENT_BYTES = 64
_BLOCK = 1 << 15  # elements; what is checked at a time must not show in the memory
_DRAWN = 1 << 20  # elements that are drawn at a time
_PERIOD = 509  # of the known values; prime, so that no chunk begins where another does


class Arrays:
    """One float32 array for each tensor. They lie one after the other in `flat`, for libraries that take one buffer."""

    def __init__(self, tensors: tuple[tuple[str, int], ...]) -> None:
        """`tensors` has the name and the number of elements of each."""
        self._names = [name for name, _ in tensors]
        self._ends = np.cumsum([count for _, count in tensors])
        total = int(self._ends[-1])
        memory = np.zeros(total * 4 + _ALIGNMENT_BYTES, np.uint8)
        offset = -memory.ctypes.data % _ALIGNMENT_BYTES
        self.flat = memory[offset : offset + total * 4].view(np.float32)
        self.tensors = np.split(self.flat, self._ends[:-1])

    def clear(self) -> None:
        """Fills all arrays with zeros, for steps without a check whose sums must not grow."""
        self.flat.fill(0)

    def draw(self, rank: int) -> None:
        """Fills in one worker's real gradients of a transformer, for steps without a check that make means.

        After the first one all have the mean, which is coded in as many bits as any other.
        """
        stock = Stock("gpt", "mlp", min(_DRAWN, self.flat.size), rank)
        for start in range(0, self.flat.size, _DRAWN):
            block = self.flat[start : start + _DRAWN]
            block[:] = stock.draw(block.size)

    def fill(self, rank: int, step: int) -> None:
        """Fills in the known values of one worker. They are whole numbers, so their sum is exact in any order."""
        for start in range(0, self.flat.size, _BLOCK):
            block = self.flat[start : start + _BLOCK]
            block[:] = _pattern(start, block.size, step) * (rank + 1)

    def check(self, step: int, worker_count: int, divisor: int) -> None:
        """Raises PoseidonError unless all values are the sum of what the workers filled in, divided by `divisor`."""
        factor = worker_count * (worker_count + 1) / 2 / divisor
        for start in range(0, self.flat.size, _BLOCK):
            block = self.flat[start : start + _BLOCK]
            expected = _pattern(start, block.size, step) * factor
            wrong = ~np.isclose(block, expected, rtol=1e-6, atol=0)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise PoseidonError(self._complaint(start + at, step, float(block[at]), float(expected[at])))

    def _complaint(self, index: int, step: int, found: float, expected: float) -> str:
        tensor = int(np.searchsorted(self._ends, index, side="right"))
        element = index - (int(self._ends[tensor - 1]) if tensor else 0)
        return (
            f"the exchange is wrong: element {element} of {self._names[tensor]} is {found:g}, not {expected:g}, "
            f"after warm-up step {step}"
        )


def _pattern(start: int, count: int, step: int) -> np.ndarray:
    return np.arange(start + step, start + step + count) % _PERIOD + 1.0
