"""The store that torchrun's agent holds, as the core wants it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from poseidon.errors import PoseidonTimeout, Unreachable

if TYPE_CHECKING:
    from poseidon.options import Settings

_POLL_S = 0.02


class AgentStore:
    """A client of the TCP store at MASTER_ADDR:MASTER_PORT, with keys of this job and restart only.

    `set` and `get` are called from one thread at a time; `get` blocks up to `timeout_s`.
    """

    def __init__(self, settings: Settings) -> None:
        from torch.distributed import PrefixStore, TCPStore

        try:
            store = TCPStore(
                settings.master_addr,
                settings.master_port,
                is_master=False,
                timeout=timedelta(seconds=settings.timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            raise Unreachable(
                f"rank {settings.rank} cannot reach torchrun's store at "
                f"{settings.master_addr}:{settings.master_port}: {error}; check MASTER_ADDR, MASTER_PORT and firewalls"
            ) from error
        # Workers that the agent restarts must not see what the failed ones published.
        self._store = PrefixStore(f"poseidon/{settings.job}/{settings.restart_count}", store)

    def set(self, key: str, value: bytes) -> None:
        """Publishes `value` under `key`."""
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until `key` is there and returns its value; PoseidonTimeout when it does not come."""
        deadline = time.monotonic() + timeout_s
        # Not `wait`: it writes warnings to the terminal whenever a key is late.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PoseidonTimeout(f"{key} was not published within {timeout_s:.1f} s")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))
