"""What layers may do in a job whose ranks may be in different steps (docs/stragglers.md)."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.layer import SyncedLayer
from poseidon.errors import InvalidArgument
from poseidon.schemes import SCHEMES


def check_layers(features: Features, entries: Sequence[SyncedLayer]) -> None:
    """Raises InvalidArgument for a layer that such a job cannot train. Chooses the one scheme that it can use."""
    drifting = features.breaking(SAME_STEP)
    if drifting is None:
        return
    for entry in entries:
        check_rounding(features, entry, entry.wire)
        if entry.asked_scheme != "auto" and not SCHEMES[entry.asked_scheme].can_drop_late:
            raise InvalidArgument(
                f"parameter {entry.name} asks for scheme {entry.asked_scheme}, in which every worker waits for all "
                f"others: with {drifting} take scheme='ps' or 'auto'"
            )
        if entry.asked_scheme == "auto":
            entry.ask_for("ps")


def check_rounding(features: Features, entry: SyncedLayer, wire: str) -> None:
    """InvalidArgument if gradients in this wire format would keep what servers may leave out."""
    drifting = features.breaking(SAME_STEP)
    if entry.keeps_rounding_of(wire) and drifting is not None:
        raise InvalidArgument(
            f"parameter {entry.name} has wire {wire} with error_feedback, which {drifting} excludes, "
            "because servers may leave out what was sent: leave one of the two out"
        )
