"""The workers of other machines, asked from the admin ports there."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.admin import Address, HttpClient
from poseidon.errors import PoseidonError
from poseidon.live import WorkerFigures


def fetch(addresses: Sequence[Address], token: str | None) -> list[WorkerFigures]:
    """The workers of all these machines, by job and rank. Raises a PoseidonError that names what does not answer."""
    found = []
    for address in addresses:
        answer = HttpClient(address, token, "poseidon metrics").ask("GET", "/workers")
        try:
            found += [WorkerFigures.from_json(fields) for fields in answer["workers"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PoseidonError(
                f"what answers at {address} is no `poseidon metrics` of this version: use one version on all machines"
            ) from None
    return sorted(found, key=lambda one: (one.run_key, one.rank))
