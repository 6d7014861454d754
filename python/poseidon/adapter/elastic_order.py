"""Which examples a worker takes in a step, as a function of the epoch, the position in it, and the workers present.

An epoch is a permutation of the examples. A step takes the next ones of it, and shares them out among its workers. The
position is the number of examples that are past. So whoever knows it knows what is left, however many workers there
were before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import InvalidArgument

_ROUNDS = 6  # of the Feistel network: more than four make a permutation that looks random
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ElasticOrder:
    """The order of `example_count` examples in each epoch, from a seed. It takes no memory.

    The same arguments give the same order on every machine, by every version of NumPy. Without `shuffle` every epoch
    has the order of the dataset.
    """

    example_count: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.example_count < 1:
            raise InvalidArgument(f"the dataset has {self.example_count} examples: it needs one or more")

    def examples(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        """The numbers of the examples at the positions from `begin` to before `end`, which may be in the next epoch."""
        if end > self.example_count:
            beyond = self.examples(epoch + 1, max(0, begin - self.example_count), end - self.example_count)
            if begin >= self.example_count:
                return beyond
            return np.concatenate([self.examples(epoch, begin, self.example_count), beyond])
        positions = np.arange(begin, end, dtype=np.uint64)
        if not self.shuffle or self.example_count == 1:
            return positions.astype(np.int64)
        half = np.uint64(-(-(self.example_count - 1).bit_length() // 2))
        first = (self.seed + (epoch << 32)) * _STEP
        keys = [_mixed(np.array([(first + i * _STEP) & _MASK], np.uint64))[0] for i in range(_ROUNDS)]
        found = _permuted(positions, half, keys)
        # The network permutes a power of 4. What it puts behind the last example is permuted on, until it is before.
        while (outside := found >= self.example_count).any():
            found[outside] = _permuted(found[outside], half, keys)
        return found.astype(np.int64)


def _permuted(values: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """One pass through a Feistel network of so many bits on each side."""
    mask = np.uint64((1 << int(half)) - 1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def step_end(example_count: int, position: int, most: int, size: int) -> int:
    """The position after a step of `size` workers that begins at this one and takes about `most` examples.

    Each worker takes one or more. So where fewer than one for each would be left for another step, this one takes them.
    Where fewer are left to begin with, because workers have come, it goes on with the next epoch: then the result is
    beyond `example_count`.
    """
    rest = example_count - position
    if rest < size:
        return position + size
    end = min(position + most, example_count)
    return example_count if example_count - end < size else end


def share(begin: int, end: int, rank: int, size: int) -> tuple[int, int]:
    """The part of the positions from `begin` to before `end` that one worker takes. Parts differ by one at most."""
    count = end - begin
    return begin + count * rank // size, begin + count * (rank + 1) // size
