"""`AgreedArrays`: arrays that one rank's values overwrite again and again, at places that all ranks have agreed on.

The values travel one after the other, without their names. So the ranks agree on names, shapes and types at the start,
and every message begins with a digest of what its sender has. Nothing is written where that is something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from poseidon.adapter.control import Control, aligned
from poseidon.errors import Mismatch

Kind = tuple[str, Sequence[int], Any]
"""The name, shape and dtype of an array."""

_DIGEST_BYTES = 16
_HEAD_BYTES = 32  # the digest, and the length of the text that follows if the sender's arrays have changed


class AgreedArrays:
    """The arrays of one model. Collective: all ranks make it, and call it, in the same order.

    `what` is what users call one of them, and `advice` what they can do where ranks have different ones.
    """

    _control: Control

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice

    def connect(self, control: Control, kinds: Sequence[Kind], sizes: Sequence[int]) -> None:
        """Notes what the ranks of `control` have, as they have found already. Its messages wait for no others'."""
        self._control = control
        self._slot = control.new_slot(f"{self._what}s of model")
        self._take(kinds, sizes)

    def _take(self, kinds: Sequence[Kind], sizes: Sequence[int]) -> None:
        self._kinds, self._sizes = list(kinds), list(sizes)
        self._digest = _digest(_text(kinds))
        # Now, because a rank that is alone at its first message cannot.
        self._control.prepare_blocks(self._total_bytes(), self._slot)

    def _total_bytes(self) -> int:
        return _HEAD_BYTES + sum(map(aligned, self._sizes))

    def broadcast(self, kinds: Sequence[Kind], arrays: Sequence[Any], root: int, root_waits: bool) -> None:
        """Overwrites the arrays of all ranks, which now have these kinds, with those of `root`. Collective.

        Without `root_waits` that rank goes on before the others have called it. Raises Mismatch, and changes nothing,
        on a rank that has other arrays than `root`.
        """
        control = self._control
        same = list(kinds) == self._kinds
        text = "" if same else _text(kinds)
        is_root = control.rank == root
        block = control.new_block(self._total_bytes())
        if is_root:
            block[:_DIGEST_BYTES] = np.frombuffer(self._digest if same else _digest(text), np.uint8)
            block[_DIGEST_BYTES:_HEAD_BYTES].view(np.int64)[0] = len(text.encode())
            if same:
                control.read(arrays, self._sizes, block[_HEAD_BYTES:])
        control.broadcast_block(block, root, root_waits, self._slot)
        theirs, length = block[:_DIGEST_BYTES].tobytes(), int(block[_DIGEST_BYTES:_HEAD_BYTES].view(np.int64)[0])
        if length:
            self._follow(kinds, arrays, root, root_waits, length)
        elif not same:
            raise self._difference(_text(self._kinds), text, root)
        elif not is_root:
            assert theirs == self._digest
            control.write(arrays, self._sizes, block[_HEAD_BYTES:])

    def _follow(self, kinds: Sequence[Kind], arrays: Sequence[Any], root: int, root_waits: bool, length: int) -> None:
        """The root has other arrays than before; so have the others, or they say which."""
        control = self._control
        own = _text(kinds)
        block = control.new_block(length)
        if control.rank == root:
            block[:length] = np.frombuffer(own.encode(), np.uint8)
        control.broadcast_block(block, root, root_waits, f"{self._slot} kinds")
        theirs = block[:length].tobytes().decode()
        if theirs != own:
            raise self._difference(theirs, own, root)
        self._take(kinds, [control.arrays.size_bytes(array) for array in arrays])
        self.broadcast(kinds, arrays, root, root_waits)

    def _difference(self, theirs: str, own: str, root: int) -> Mismatch:
        rank = self._control.rank
        ours, others = _by_name(own), _by_name(theirs)
        extra = next((name for name in ours if name not in others), None)
        missing = next((name for name in others if name not in ours), None)
        other = next((name for name in ours if name in others and ours[name] != others[name]), None)
        if extra is not None:
            how = f"rank {rank} has {extra} ({ours[extra]}), which rank {root} has not"
        elif missing is not None:
            how = f"rank {root} has {missing} ({others[missing]}), which rank {rank} has not"
        elif other is not None:
            how = f"{other} has {ours[other]} on rank {rank} and {others[other]} on rank {root}"
        else:
            how = f"rank {rank} has them in another order than rank {root}"
        return Mismatch(f"the ranks have different {self._what}s: {how}; {self._advice}")


def _text(kinds: Sequence[Kind]) -> str:
    return "\n".join(
        f"{name}\tshape {tuple(shape)}, {str(dtype).removeprefix('torch.')}" for name, shape, dtype in kinds
    )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _by_name(text: str) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in text.split("\n") if line)
