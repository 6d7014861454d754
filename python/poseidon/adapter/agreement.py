"""The check that all ranks have built the same."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from poseidon.adapter.control import Control
from poseidon.errors import Mismatch, PoseidonError


def check_same(control: Control, description: str, what: str) -> None:
    """Raises Mismatch on every rank, with the first difference, unless all ranks describe the same `what`."""
    texts = _texts_that_differ(control, description)
    if texts is not None:
        rank, theirs, ours = _first_difference(texts)
        error = Mismatch(
            f"the ranks built different {what}s: rank 0 has {ours!r}, rank {rank} has {theirs!r}; "
            f"build the {what} from the same code and options on every rank"
        )
        error.groups = tuple(texts.index(text) for text in texts)
        raise error


def broadcast_alike(control: Control, arrays: Mapping[str, Any], root: int, what: str) -> None:
    """Overwrites these arrays, by name, with those of `root`. Collective.

    Raises Mismatch on every rank, and changes nothing, unless all ranks have the same names, shapes and dtypes. `what`
    is what users call all of them.
    """
    kinds = [f"{name}: shape {tuple(array.shape)}, dtype {array.dtype}" for name, array in arrays.items()]
    check_same(control, "\n".join(kinds), what)
    control.broadcast(list(arrays.values()), root)


def first_difference(control: Control, text: str) -> tuple[int, str, str] | None:
    """The first rank whose text differs from rank 0's, its first different line, and rank 0's; or None. Collective."""
    texts = _texts_that_differ(control, text)
    return None if texts is None else _first_difference(texts)


def _texts_that_differ(control: Control, text: str) -> list[str] | None:
    """All ranks' texts, unless they are equal. Collective."""
    texts = control.texts_if_different(text)
    if texts is None:
        return None
    # So that nobody ends, which would be an error of its own, before all have the texts.
    with contextlib.suppress(PoseidonError):
        control.barrier()
    return texts


def _first_difference(texts: Sequence[str]) -> tuple[int, str, str]:
    rank = next(rank for rank, other in enumerate(texts) if other != texts[0])
    pairs = zip_longest(texts[rank].split("\n"), texts[0].split("\n"), fillvalue="nothing more")
    theirs, ours = next((theirs, ours) for theirs, ours in pairs if theirs != ours)
    return rank, theirs, ours
