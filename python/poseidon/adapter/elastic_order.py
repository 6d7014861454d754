"""Which examples a worker takes in a step, as a function of the epoch, the position in it, and the workers present.

An epoch is a permutation of the examples. A step takes the next ones of it, and shares them out among its workers. The
position is the number of examples that are past. So whoever knows it knows what is left, however many workers there
were before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poseidon.errors import InvalidArgument

_ROUNDS = 6  # of the Feistel network: more than four make a permutation that looks random
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MOST_SORTED = 1 << 16  # examples


@dataclass(frozen=True)
class ElasticOrder:
    """The order of `example_count` examples in each epoch, from a seed. It takes next to no memory.

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
        key = _epoch_key(self.seed, epoch)
        if self.example_count <= _MOST_SORTED:
            return _sorted_by_key(self.example_count, key)[begin:end]
        keys = _mixed(np.array([(key + number * _STEP) & _MASK for number in range(_ROUNDS)], np.uint64))
        bits = (self.example_count - 1).bit_length()
        found = _permuted(positions, bits, keys)
        # The network permutes a power of 2. What it puts behind the last example is permuted on, until it is before.
        while (outside := np.flatnonzero(found >= self.example_count)).size:
            found[outside] = _permuted(found[outside], bits, keys)
        return found.astype(np.int64)


def _epoch_key(seed: int, epoch: int) -> int:
    """What makes one epoch's permutation another one than others'."""
    of_seed = int(_mixed(np.array([seed & _MASK], np.uint64))[0])
    return int(_mixed(np.array([(of_seed + (epoch + 1) * _STEP) & _MASK], np.uint64))[0])


@functools.lru_cache(maxsize=4)
def _sorted_by_key(count: int, key: int) -> NDArray[np.int64]:
    """A permutation of a few examples, for which the network has too few bits."""
    keys = _mixed(np.arange(count, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(key))
    return np.argsort(keys, kind="stable").astype(np.int64)


def _permuted(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One pass through a Feistel network over so many bits. Its sides change their sizes in each round, which are even.

    So an odd number of bits can be permuted, too.
    """
    low = np.uint64(bits - bits // 2)
    masks = [np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << int(low)) - 1)]
    left, right = values >> low, values & masks[1]
    for number, key in enumerate(keys):
        left, right = right, left ^ (_mixed(right ^ key) & masks[number % 2])
    return (left << low) | right


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
