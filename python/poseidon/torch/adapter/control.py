"""Small blocking exchanges between the ranks, beside the gradients.

Every rank must make the same calls in the same order. Gradients may be in flight meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from poseidon.torch.tensors.memory import align, borrowed, byte_view

if TYPE_CHECKING:
    from poseidon import _core

_BLOCK_BYTES = 16 << 20
_ONE_HOT_BYTES = 64 << 10
"""Up to this much is gathered in one exchange, in which every rank also sends zeros in the places of the others."""


class Control:
    """Sums, gathers and broadcasts over all ranks of one client. Blocks up to the client's timeout."""

    def __init__(self, client: _core.Client) -> None:
        self.on_exchange: Callable[[], None] | None = None  # before anything is exchanged, gradients too
        self._client = client
        self._layers: dict[tuple[str, int], int] = {}
        self._sent: dict[int, torch.Tensor] = {}  # by layer, what is on its way and nobody here waits for

    def _layer(self, dtype: str, element_count: int) -> int:
        key = (dtype, element_count)
        if key not in self._layers:
            from poseidon import _core

            layer = _core.Layer(f"control {dtype} {element_count}", dtype, element_count, 0, 0, "ps")
            self._layers[key], _ = self._client.add_layers([layer], transient=True)
            # Someone waits for each of these, so they overtake gradients that are in flight.
            self._client.set_priorities(self._layers[key], [1.0], [0], 0.0)
        return self._layers[key]

    def note_exchange(self) -> None:
        """The ranks are about to exchange something; raises what `on_exchange` has against it."""
        if self.on_exchange is not None:
            self.on_exchange()

    def _exchange(self, dtype: str, values: torch.Tensor, present: bool, divisor: int = 1, waits: bool = True) -> None:
        self.note_exchange()
        layer = self._layer(dtype, values.numel())
        if layer in self._sent:
            self._client.wait(layer)
            del self._sent[layer]
        start = self._client.start if present else self._client.start_absent
        start(layer, borrowed(values), divisor)
        if waits:
            self._client.wait(layer)
        else:
            self._sent[layer] = values

    def sum(self, values: Sequence[int]) -> list[int]:
        """The element-wise sums of all ranks' 64-bit integers."""
        vector = torch.tensor(values, dtype=torch.int64)
        self._exchange("int64", vector, present=True)
        return vector.tolist()

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.sum([1])

    def add(self, values: torch.Tensor, divisor: int = 1) -> None:
        """Replaces the elements of a 1-D CPU tensor by their sums over all ranks, added in rank order.

        dtype float32 or float64, then divided by `divisor`; or int64, with divisor 1. Every rank gets the same bits.
        """
        itemsize, dtype = values.element_size(), str(values.dtype).removeprefix("torch.")
        for piece in values.split(_BLOCK_BYTES // itemsize):
            block = values.new_zeros(_block_bytes(piece.nbytes) // itemsize)
            block[: piece.numel()] = piece
            self._exchange(dtype, block, present=True, divisor=divisor)
            piece.copy_(block[: piece.numel()])

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's bytes, a row of each: `row` is a 1-D uint8 CPU tensor of one size on all ranks."""
        rank, size, width = self._client.rank, self._client.world_size, row.numel()
        if size * width > _ONE_HOT_BYTES:
            rows = row.expand(size, width).contiguous()
            for root in range(size):
                self.broadcast([rows[root]], root)
            return rows
        block = torch.zeros(_block_bytes(size * width), dtype=torch.uint8)
        rows = block[: size * width].view(size, width)
        rows[rank] = row
        self._exchange("uint8", block, present=True)
        return rows

    def one_hot(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's `values` (equally many on each), by rank."""
        width, rank, size = len(values), self._client.rank, self._client.world_size
        row = [0] * (width * size)
        row[rank * width : (rank + 1) * width] = values
        total = self.sum(row)
        return [total[r * width : (r + 1) * width] for r in range(size)]

    def texts_if_different(self, text: str) -> list[str] | None:
        """None if all ranks passed the same text; otherwise every rank's, by rank."""
        data = text.encode()
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
        rows = self.one_hot([digest, len(data)])
        if all(row == rows[0] for row in rows):
            return None
        lengths = [length for _, length in rows]
        starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        block = bytearray(_block_bytes(starts[-1]))
        rank = self._client.rank
        block[starts[rank] : starts[rank + 1]] = data
        self._exchange("uint8", torch.frombuffer(block, dtype=torch.uint8), present=True)
        return [block[starts[r] : starts[r + 1]].decode() for r in range(len(lengths))]

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, root_waits: bool = True) -> None:
        """Overwrites the tensors (any dtype, device and layout) of all ranks with those of `root`.

        Not `root_waits`: that rank goes on before the others have called it, unless there is more than 16 MiB.
        """
        pending: list[torch.Tensor] = []
        pending_bytes = 0
        for tensor in tensors:
            size_bytes = tensor.numel() * tensor.element_size()
            if pending and pending_bytes + size_bytes > _BLOCK_BYTES:
                self._broadcast_block(pending, root, root_waits)
                pending, pending_bytes = [], 0
            pending.append(tensor)
            pending_bytes += align(size_bytes)
        if pending_bytes:
            self._broadcast_block(pending, root, root_waits)

    def _broadcast_block(self, tensors: Sequence[torch.Tensor], root: int, root_waits: bool) -> None:
        flat = FlatBytes(tensors)
        is_root = self._client.rank == root
        if is_root:
            flat.pack()
        for start in range(0, flat.block.numel(), _BLOCK_BYTES):
            piece = flat.block[start : start + _BLOCK_BYTES]
            self._exchange("uint8", piece, present=is_root, waits=root_waits or not is_root)
        if not is_root:
            flat.unpack()


def _block_bytes(size_bytes: int) -> int:
    """`size_bytes` rounded up to a power of two, or to a multiple of 16 MiB: few sizes of layers serve all blocks."""
    power = max(64, 1 << (size_bytes - 1).bit_length()) if size_bytes else 64
    return min(power, max(1, -(-size_bytes // _BLOCK_BYTES)) * _BLOCK_BYTES)


class FlatBytes:
    """Tensors one after the other in one block of bytes, each at an aligned offset.

    `block` is a uint8 CPU tensor, of one of few sizes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._offsets: list[int] = []
        end = 0
        for tensor in self._tensors:
            self._offsets.append(end)
            end += align(tensor.numel() * tensor.element_size())
        self.block = torch.zeros(_block_bytes(end), dtype=torch.uint8)

    def _slices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        return [
            (tensor, self.block[offset : offset + size])
            for tensor, offset, size in zip(self._tensors, self._offsets, sizes, strict=True)
            if size
        ]

    def pack(self) -> None:
        """Copies the tensors into the block."""
        for tensor, piece in self._slices():
            piece.copy_(byte_view(tensor))

    def unpack(self) -> None:
        """Copies the block into the tensors."""
        with torch.no_grad():
            for tensor, piece in self._slices():
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
