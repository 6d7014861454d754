"""What an adapter refuses, so that no option is ignored without a word."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from poseidon.errors import InvalidArgument
from poseidon.options import Settings


def check_supported(settings: Settings, adapter: str, supported: Mapping[str, Collection[object]]) -> None:
    """Raises InvalidArgument for an option whose value is not among those that the adapter can do, by its name."""
    for name, values in supported.items():
        given = getattr(settings, name)
        if given not in values:
            able = ", ".join(str(value) or '""' for value in values)
            raise InvalidArgument(
                f"poseidon.{adapter} does not support {name}={given}: leave {name} out (it can be {able}), or use "
                "poseidon.torch"
            )
