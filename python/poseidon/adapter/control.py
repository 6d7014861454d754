"""Small blocking exchanges between the ranks, beside the gradients.

Every rank must make the same calls in the same order. Gradients may be in flight meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon import _core
from poseidon.adapter.arrays import Arrays, Bytes

_BLOCK_BYTES = 16 << 20
_ALIGNMENT_BYTES = 16
_BARRIER = "barrier()"
_ONE_HOT_BYTES = 64 << 10
"""Up to this much is gathered in one exchange, in which every rank also sends zeros in the places of the others."""


class Control:
    """Sums, gathers and broadcasts over all ranks of one client. Each call blocks up to the client's timeout.

    `arrays` are the framework's, for `broadcast`. Use it from the thread that trains.
    """

    def __init__(self, client: _core.Client, arrays: Arrays) -> None:
        self.on_exchange: Callable[[], None] | None = None  # before anything is exchanged, gradients too
        self.arrays = arrays
        self.threads: set[int] = set()  # that exchange, or train in order to
        self.rank, self.world_size = client.rank, client.world_size
        self._client = client
        self._layers: dict[tuple[str, int, str], int] = {}
        self._slot_count = 0
        self._sent: dict[int, NDArray[Any]] = {}  # by layer, what is on its way and nobody here waits for
        for slot in (_BARRIER, ""):  # on all ranks, although one may wait, or send a number, before the others do
            self._layer("int64", 1, slot)

    def _layer(self, dtype: str, element_count: int, slot: str = "") -> int:
        key = (dtype, element_count, slot)
        if key not in self._layers:
            layer = _core.Layer(_layer_name(dtype, element_count, slot), dtype, element_count, 0, 0, "ps")
            self._layers[key], _ = self._client.add_layers([layer], transient=True)
            # Someone waits for each of these, so they overtake gradients that are in flight.
            self._client.set_priorities(self._layers[key], [1.0], [0], 0.0)
        return self._layers[key]

    def note_exchange(self) -> None:
        """Notes that the ranks are about to exchange something. Raises the error of `on_exchange`, if it has one."""
        self.note_thread()
        if self.on_exchange is not None:
            self.on_exchange()

    def note_thread(self) -> None:
        """Notes that this thread trains: the other ranks wait for it, so they hear of its failure."""
        self.threads.add(threading.get_ident())

    def _exchange(
        self, values: NDArray[Any], present: bool, divisor: int = 1, waits: bool = True, slot: str = ""
    ) -> None:
        self.note_exchange()
        layer = self._layer(values.dtype.name, values.size, slot)
        if layer in self._sent:
            self._client.wait(layer)
            del self._sent[layer]
        start = self._client.start if present else self._client.start_absent
        start(layer, values, divisor)
        if waits:
            self._client.wait(layer)
        else:
            self._sent[layer] = values

    def sum(self, values: Sequence[int]) -> list[int]:
        """The element-wise sums of all ranks' 64-bit integers."""
        vector = np.array(values, np.int64)
        self._exchange(vector, present=True)
        return vector.tolist()  # type: ignore[no-any-return]

    def prepare_sum(self, count: int, slot: str) -> None:
        """Collective: makes known what `start_sum` of so many integers needs, so that it does not block."""
        self._layer("int64", count, slot)

    def start_sum(self, values: Sequence[int], slot: str = "") -> Callable[[], list[int]]:
        """Starts `sum`, and returns what waits for it and returns the sums. Call that before the next one of this slot,
        whose sums do not mix with those of others."""
        vector = np.array(values, np.int64)
        self._exchange(vector, present=True, waits=False, slot=slot)
        layer = self._layer("int64", vector.size, slot)

        def result() -> list[int]:
            if self._sent.get(layer) is vector:
                self._client.wait(layer)
                del self._sent[layer]
            return vector.tolist()  # type: ignore[no-any-return]

        return result

    def barrier(self) -> None:
        """Returns once every rank has called it. It does not mix with another agreement on some rank."""
        self._exchange(np.ones(1, np.int64), present=True, slot=_BARRIER)

    def add(self, values: NDArray[Any], divisor: int = 1) -> None:
        """Replaces the elements of a 1-D array by their sums over all ranks, added in rank order.

        A float32 or float64 sum is divided by `divisor`. For int64 the divisor is 1. Every rank gets the same bits.
        """
        piece_size = _BLOCK_BYTES // values.itemsize
        for start in range(0, values.size, piece_size):
            piece = values[start : start + piece_size]
            block = np.zeros(_block_bytes(piece.nbytes) // values.itemsize, values.dtype)
            block[: piece.size] = piece
            self._exchange(block, present=True, divisor=divisor)
            piece[:] = block[: piece.size]

    def gather(self, row: Bytes) -> NDArray[np.uint8]:
        """Every rank's bytes: one row for each rank. `row` has the same size on all ranks."""
        rank, size, width = self.rank, self.world_size, row.size
        if size * width > _ONE_HOT_BYTES:
            rows = np.empty((size, width), np.uint8)
            rows[rank] = row
            for root in range(size):
                self.broadcast_bytes(rows[root], root)
            return rows
        block = np.zeros(_block_bytes(size * width), np.uint8)
        rows = block[: size * width].reshape(size, width)
        rows[rank] = row
        self._exchange(block, present=True)
        return rows

    def one_hot(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's `values`, by rank. All ranks pass the same number of values."""
        width, size = len(values), self.world_size
        row = [0] * (width * size)
        row[self.rank * width : (self.rank + 1) * width] = values
        total = self.sum(row)
        return [total[r * width : (r + 1) * width] for r in range(size)]

    def gather_lists(self, own: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank. They are not negative. Ranks may pass different counts of them."""
        most = max(row[0] for row in self.one_hot([len(own)]))
        rows = self.one_hot([*own, *[-1] * (most - len(own))]) if most else [[]] * self.world_size
        return [[number for number in row if number >= 0] for row in rows]

    def texts_if_different(self, text: str) -> list[str] | None:
        """None if all ranks passed the same text. Otherwise every rank's text, by rank."""
        data = text.encode()
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
        rows = self.one_hot([digest, len(data)])
        if all(row == rows[0] for row in rows):
            return None
        lengths = [length for _, length in rows]
        starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        block = np.zeros(_block_bytes(starts[-1]), np.uint8)
        block[starts[self.rank] : starts[self.rank + 1]] = np.frombuffer(data, np.uint8)
        self._exchange(block, present=True)
        return [block[starts[r] : starts[r + 1]].tobytes().decode() for r in range(len(lengths))]

    def broadcast(self, arrays: Sequence[Any], root: int) -> None:
        """Overwrites the framework's arrays (any dtype, device and layout) of all ranks with those of `root`.

        The ranks have agreed on the number of arrays, their shapes and dtypes. Arrays that come back in every step are
        `AgreedArrays`.
        """
        pending: list[Any] = []
        pending_bytes = 0
        for array in arrays:
            size_bytes = self.arrays.size_bytes(array)
            if pending and pending_bytes + size_bytes > _BLOCK_BYTES:
                self._broadcast_arrays(pending, pending_bytes, root)
                pending, pending_bytes = [], 0
            pending.append(array)
            pending_bytes += aligned(size_bytes)
        if pending_bytes:
            self._broadcast_arrays(pending, pending_bytes, root)

    def broadcast_bytes(self, data: Bytes, root: int) -> None:
        """Overwrites `data`, of one size on all ranks, with that of `root`."""
        block = self.new_block(data.size)
        block[: data.size] = data
        self.broadcast_block(block, root)
        data[:] = block[: data.size]

    def _broadcast_arrays(self, arrays: Sequence[Any], total_bytes: int, root: int) -> None:
        """The arrays lie one after the other in one block."""
        block = self.new_block(total_bytes)
        sizes = [self.arrays.size_bytes(array) for array in arrays]
        if self.rank == root:
            self.read(arrays, sizes, block)
        self.broadcast_block(block, root)
        if self.rank != root:
            self.write(arrays, sizes, block)

    def read(self, arrays: Sequence[Any], sizes: Sequence[int], block: Bytes) -> None:
        """Copies these arrays of so many bytes each into the block, each to a place where any dtype may lie."""
        for array, place in _places(arrays, sizes, block):
            place[:] = self.arrays.bytes_of(array)

    def write(self, arrays: Sequence[Any], sizes: Sequence[int], block: Bytes) -> None:
        """Overwrites the arrays with what `read` has put there."""
        for array, place in _places(arrays, sizes, block):
            self.arrays.overwrite(array, place)

    # Blocks of bytes, each of a size that all ranks know.

    def new_slot(self, what: str) -> str:
        """The name of a series of blocks, for which the messages of others do not have to be over."""
        self._slot_count += 1
        return f"{what} {self._slot_count}"

    def new_block(self, size_bytes: int) -> Bytes:
        """A block of zeros for at least so many bytes."""
        return np.zeros(_block_bytes(size_bytes), np.uint8)

    def prepare_blocks(self, size_bytes: int, slot: str) -> None:
        """Collective: makes known what `broadcast_block` with this slot needs, so that one rank may begin alone."""
        for number, piece in enumerate(_pieces(np.empty(_block_bytes(size_bytes), np.uint8))):
            self._layer(piece.dtype.name, piece.size, f"{slot} {number}")

    def broadcast_block(self, block: Bytes, root: int, root_waits: bool = True, slot: str = "") -> None:
        """Overwrites a block, of one size on all ranks, with that of `root`.

        Without `root_waits` that rank goes on before the others have called it. It then waits for them only with the
        next block of this slot, which is to be that of a series.
        """
        is_root = self.rank == root
        for number, piece in enumerate(_pieces(block)):
            place = f"{slot} {number}" if slot else ""
            self._exchange(piece, present=is_root, waits=root_waits or not is_root, slot=place)


def _pieces(block: Bytes) -> list[Bytes]:
    return [block[start : start + _BLOCK_BYTES] for start in range(0, block.size, _BLOCK_BYTES)]


def _places(arrays: Sequence[Any], sizes: Sequence[int], block: Bytes) -> Iterator[tuple[Any, Bytes]]:
    """The arrays that have bytes, each with its part of the block."""
    end = 0
    for array, size_bytes in zip(arrays, sizes, strict=True):
        if size_bytes:
            yield array, block[end : end + size_bytes]
        end += aligned(size_bytes)


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up so that any dtype may follow."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _block_bytes(size_bytes: int) -> int:
    """`size_bytes` rounded up to a power of two, or to a multiple of 16 MiB, so that few layers serve all blocks."""
    power = max(64, 1 << (size_bytes - 1).bit_length()) if size_bytes else 64
    return min(power, max(1, -(-size_bytes // _BLOCK_BYTES)) * _BLOCK_BYTES)


def _layer_name(dtype: str, element_count: int, slot: str) -> str:
    """What a message about a failed exchange calls it."""
    what = slot or "an agreement of the ranks"
    return f"{what} ({element_count} x {dtype})"
