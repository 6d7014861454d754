"""Makes flight records as processes write them, for tests of what is concluded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTS = ("host-a", "host-b")


def link(rank: int, *, connected: bool = True, left: bool = False, silent_ms: float = 5.0) -> dict[str, Any]:
    """A connection to another rank."""
    return {
        "party": "peer",
        "index": rank,
        "lane": 0,
        "host": HOSTS[rank // 2 % 2],
        "address": f"10.0.0.{rank + 1}:4000",
        "connected": connected,
        "greeted": True,
        "left": left,
        "last_progress_ms": silent_ms,
        "bytes_sent": 1,
        "bytes_received": 1,
        "receiving": None,
    }


def waiting(
    layer: str, step: int, *, unit: int = 1, ranks: tuple[int, ...] = (), servers: tuple[int, ...] = ()
) -> dict[str, Any]:
    """An exchange that is not complete."""
    return {
        "layer": layer,
        "unit": unit,
        "scheme": "sfb" if ranks else "ps",
        "step": step,
        "for": "waiting for its end",
        "ranks": list(ranks),
        "servers": list(servers),
        "chunks_missing": len(servers),
        "sends_pending": 0,
    }


def record(
    rank: int,
    how: str,
    about: int | None = None,
    *,
    message: str = "it failed",
    code: str = "peer_lost",
    waits: tuple[dict[str, Any], ...] = (),
    links: tuple[dict[str, Any], ...] = (),
    missing: tuple[int, ...] = (),
    **changes: Any,
) -> dict[str, Any]:
    """The record of a rank of four, two on each host. `missing`: whose push its server waits for in unit 1, step 3."""
    chunk = {"unit": 1, "chunk": 0, "step": 3, "since_ms": 10.0, "missing_ranks": list(missing)}
    core = {"connections": [], "open_chunk_count": 1, "open_chunks": [chunk] if missing else [], "loop": {}}
    content = {
        "format": "poseidon flight record",
        "format_version": 1,
        "poseidon": "0.1.0",
        "process": "worker",
        "job": "default",
        "run": "aa",
        "generation": 1,
        "rank": rank,
        "slot": rank,
        "world_size": 4,
        "host": HOSTS[rank // 2 % 2],
        "boot": HOSTS[rank // 2 % 2],
        "pid": 1000 + rank,
        "wall_s": 1000.0 + rank,
        "monotonic_ns": 5_000_000_000 + rank * 1_000_000,
        "timeout_s": 10.0,
        "phase": "running",
        "error": {"code": code, "message": message},
        "learnt": {"how": how, "party": "none" if about is None else "peer", "index": about},
        "not_linked": "",
        "waiting_count": len(waits),
        "waiting": list(waits),
        "links": list(links),
        "units": {},
        "client": {},
        "server": [core],
    }
    return content | changes


def write(directory: Path, *records: dict[str, Any]) -> Path:
    """Writes them as files with the names that records have."""
    directory.mkdir(exist_ok=True)
    for number, content in enumerate(records):
        (directory / f"poseidon-default-rank{number}-20260101-000000.000-{number}.json").write_text(json.dumps(content))
    return directory
