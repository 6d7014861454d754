"""Numbers with the exponents of the sample: real exponents in their order, random signs and mantissas.

At each place of a gradient all ranks have exponents of the same place of the same real gradient, each those of another
worker, and signs and mantissas of their own. So the mean over ranks is like that of real gradients.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from poseidon.gradients.coded_bits import BLOCK
from poseidon.gradients.exponents import exponents, index

_SURPLUS_BLOCKS = 256  # more than the largest gradient has: so many different windows of the stock
_MOST_BLOCKS = 1 << 14  # of a window; larger gradients are several windows
_PATTERNS = 4  # of looked-up rows; they take turns


def with_exponents(biased: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.float32]:
    """Float32 numbers of these exponents with random signs and mantissas; 0 where the exponent is 0."""
    words = random.integers(1 << 32, size=biased.shape, dtype=np.uint32)
    words &= 0x807FFFFF
    words |= biased.astype(np.uint32) << 23
    words[biased == 0] = 0
    return words.view(np.float32)


class Stock:
    """Numbers of one kind of layer, of which every gradient is a window at a place of its own."""

    def __init__(self, family: str, kind: str, largest_count: int, rank: int) -> None:
        """`largest_count`: the most numbers that are drawn at once. KeyError for a kind that the sample lacks."""
        seed = crc32(f"{family}/{kind}".encode())
        self._places = np.random.default_rng(seed)  # the same on all ranks
        steps = index()["steps"][1:]  # what a training has but once is not replayed
        worker = rank % index()["workers"]
        stretches = np.concatenate([exponents(family, kind, step)[worker] for step in steps])
        self._blocks = min(-(-largest_count // BLOCK), _MOST_BLOCKS)
        count = (self._blocks + _SURPLUS_BLOCKS) * BLOCK
        rounds = -(-count // stretches.size)  # each has all stretches once
        chosen = np.concatenate([self._places.permutation(len(stretches)) for _ in range(rounds)])
        biased = stretches[chosen].reshape(-1)[:count]
        self._numbers = with_exponents(biased, np.random.default_rng((seed, rank)))

    def draw(self, count: int) -> NDArray[np.float32]:
        """A new array of `count` numbers."""
        drawn = np.empty(count, np.float32)
        for start in range(0, count, self._blocks * BLOCK):
            piece = drawn[start : start + self._blocks * BLOCK]
            place = int(self._places.integers(_SURPLUS_BLOCKS)) * BLOCK
            piece[:] = self._numbers[place : place + piece.size]
        return drawn


class LookedUp:
    """Gradients of an embedding of which one batch looks up few rows, by Zipf's law; the others are zero.

    A scaled embedding has as many zeros as the whole one: its memory is a piece of the whole one's, with rows of the
    whole one's width. So a block of the coder lies in a row, or has many of them, as it does there.
    """

    def __init__(self, name: str, shape: tuple[int, ...], look_ups: int, exponent: float, count: int) -> None:
        """`shape` (rows, width), `look_ups` and the law's `exponent` are the whole embedding's. `count`: the values of
        the scaled one."""
        self._rows, self.width = shape
        self._count = count
        self._slots = -(-count // self.width)
        self._look_ups = look_ups
        self._seed = crc32(name.encode())
        self._chances = np.cumsum(np.arange(1, self._rows + 1, dtype=np.float64) ** -exponent)
        # Each slot stands for one row of many. Popular and rare ones have their share, and lie in random places.
        ranks = ((np.arange(self._slots) + 0.5) * self._rows / self._slots).astype(np.int64)
        self._ranks = np.random.default_rng(self._seed).permutation(ranks)
        self._patterns: list[NDArray[np.int64]] = []
        self._turn = 0

    def prepare(self, rank: int) -> int:
        """Draws what the batches of this rank look up. Returns the most values that one of them touches."""
        random = np.random.default_rng((self._seed, rank))
        for _ in range(_PATTERNS):
            draws = np.searchsorted(self._chances, random.random(self._look_ups) * self._chances[-1])
            touched = np.zeros(self._rows, bool)
            touched[np.minimum(draws, self._rows - 1)] = True
            self._patterns.append(np.flatnonzero(touched[self._ranks]))
        return max(1, max(map(len, self._patterns))) * self.width

    def draw(self, stock: Stock) -> NDArray[np.float32]:
        """The next batch's gradient, flat. `prepare` has been called."""
        slots = self._patterns[self._turn % _PATTERNS]
        self._turn += 1
        gradient = np.zeros((self._slots, self.width), np.float32)
        gradient[slots] = stock.draw(slots.size * self.width).reshape(-1, self.width)
        return gradient.reshape(-1)[: self._count]


def factor(family: str, kind: str, shape: tuple[int, int], rank: int, seed: int) -> NDArray[np.float32]:
    """One factor (K rows × width) of a fully connected layer; `kind` has ".rows" or ".outputs" at its end.

    Columns are zero in all rows where they were in the sampled batch, however few rows are drawn: so the product has as
    many zeros as that of a whole batch. `seed` says which pieces are taken, on all ranks alike.
    """
    pieces = exponents(family, kind, index()["steps"][-1])
    common = np.random.default_rng(seed)
    columns: list[NDArray[np.uint8]] = []
    while sum(map(len, columns)) < shape[1]:
        piece = pieces[rank % len(pieces), common.integers(pieces.shape[1])]
        rows = np.resize(common.permutation(len(piece)), shape[0])
        drawn = piece[rows]
        missed = piece.any(axis=0) & ~drawn.any(axis=0)
        drawn[common.integers(shape[0], size=drawn.shape[1])[missed], missed] = piece.max(axis=0)[missed]
        columns.append(drawn.T)
    biased = np.ascontiguousarray(np.concatenate(columns)[: shape[1]].T)
    return with_exponents(biased, np.random.default_rng((seed, rank)))
