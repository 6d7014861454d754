"""Stores that others serve, in which the ranks of a job find each other, with the interface that the core needs.

torchrun's agent serves one, and torch.distributed has one if a program has initialized it. PyTorch is imported only if
one of them exists.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from poseidon.errors import PoseidonTimeout, Unreachable

if TYPE_CHECKING:
    from torch.distributed import Store

    from poseidon.options import Settings

_POLL_S = 0.02


class SharedStore:
    """A store that others serve. It sees only the keys of this job and restart.

    `set` and `get` are called from one thread at a time; `get` blocks up to `timeout_s`.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        from torch.distributed import PrefixStore

        # Workers that torchrun's agent restarts must not see what the failed ones published.
        self._store = PrefixStore(f"poseidon/{settings.job}/{settings.restart_count}", store)

    def set(self, key: str, value: bytes) -> None:
        """Publishes `value` under `key`."""
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are fine

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for `key` and returns its value. Raises PoseidonTimeout if it does not come."""
        deadline = time.monotonic() + timeout_s
        # Not `wait`: it writes warnings to the terminal whenever a key is late.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PoseidonTimeout(f"{key} was not published within {timeout_s:.1f} s")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))


def default_store() -> Store | None:
    """The store in which torch.distributed's ranks have met, or None if it is not initialized."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()  # type: ignore[no-any-return]


def shared_store(settings: Settings) -> SharedStore | None:
    """The store of torch.distributed, if that is initialized, or of torchrun's agent. None if there is neither.

    Raises Unreachable if an agent does not answer.
    """
    store = default_store()
    if store is None and settings.use_agent_store:
        store = _agents_store(settings)
    return None if store is None else SharedStore(store, settings)


def agents_store(settings: Settings) -> SharedStore | None:
    """The store of torchrun's agent, which outlives the processes. None if there is no agent."""
    return SharedStore(_agents_store(settings), settings) if settings.use_agent_store else None


def _agents_store(settings: Settings) -> Store:
    from torch.distributed import TCPStore

    try:
        return TCPStore(
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
