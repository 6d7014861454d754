"""`chunk_bytes="auto"`: one size for all ranks, kept for the next start, whatever the cache holds."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import workers
from poseidon.launch import free_port

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
LAYER_BYTES = 12 << 20


def start(port: int, cache: str, flows: int) -> tuple[list[int], float, list[str]]:
    """The chunks of a layer that was added after the start, how long it took, and what was warned of."""
    from poseidon._core import Client, Layer
    from poseidon.chunk_cache import settle_chunk_bytes
    from poseidon.options import resolve

    os.environ["XDG_CACHE_HOME"] = cache
    settings = resolve(master_port=port, timeout=20, chunk_bytes="auto", flows=flows)
    client = Client.connect(settings.core())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        settle_chunk_bytes(client, settings)
        seconds = time.monotonic() - began
    _, plan = client.add_layers([Layer("probe", "float32", LAYER_BYTES // 4, scheme="ps")])
    client.shutdown()
    return [chunk.size_bytes for chunk in plan.units[0].chunks], seconds, [str(w.message) for w in caught]


def start_all(cache: Path, flows: int = 1) -> tuple[list[int], float, list[str]]:
    """What rank 0 of two says; both have the same chunks, and rank 0 alone reads and writes."""
    first, second = workers.run(2, start, free_port(), str(cache), flows)
    assert first[0] == second[0]
    assert second[2] == []
    return first


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "poseidon" / "chunk_bytes").iterdir())


def content(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def test_the_second_start_knows_what_the_first_has_measured(tmp_path: Path) -> None:
    chunks, measuring_seconds, warned = start_all(tmp_path)
    assert warned == []
    (path,) = entries(tmp_path)
    assert content(path)["chunk_bytes"] == max(chunks)
    again, seconds, _ = start_all(tmp_path)
    assert again == chunks
    assert seconds < measuring_seconds

    known = {**content(path), "chunk_bytes": 96 << 10}  # a size that the search does not try
    path.write_text(json.dumps(known))
    chunks, _, _ = start_all(tmp_path)
    assert max(chunks) == 96 << 10
    assert entries(tmp_path) == [path]

    start_all(tmp_path, flows=2)  # other settings do not share the answer
    assert len(entries(tmp_path)) == 2
    assert content(path) == known


def test_a_corrupt_file_is_replaced(tmp_path: Path) -> None:
    start_all(tmp_path)
    (path,) = entries(tmp_path)
    for text in ("no json", '{"chunk_bytes": "auto"}'):
        path.write_text(text)
        chunks, _, warned = start_all(tmp_path)
        assert len(warned) == 1
        assert "cannot be read" in warned[0]
        assert content(path)["chunk_bytes"] == max(chunks)
        assert entries(tmp_path) == [path]


def test_a_cache_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    chunks, _, warned = start_all(taken)
    assert chunks
    assert ["cannot be read" in text or "cannot be kept" in text for text in warned] == [True, True]
