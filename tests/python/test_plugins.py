"""Plugins are compiled once, whole or not at all, and what killed compilers leave goes away."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.adapter.plugins import PluginError, compiled


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "poseidon" / "plugins"


def source(folder: Path, text: str) -> Path:
    path = folder / "answer.cc"
    path.write_text(text)
    return path


def test_several_at_once_compile_one_file(tmp_path: Path, cache: Path) -> None:
    plugin = source(tmp_path, 'extern "C" int answer() { return 42; }')
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: compiled(plugin, "test1", []), range(4)))
    assert [path.name for path in cache.iterdir()] == [path.name for path in paths]
    assert len(paths) == 1


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(PluginError, match="the compiler says of test1-answer"):
        compiled(source(tmp_path, "int answer() {"), "test1", [])
    assert list(cache.iterdir()) == []


def test_what_a_killed_compiler_has_left_goes_away(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    old, young = cache / "partial-old.so", cache / "partial-young.so"
    for path in (old, young):
        path.touch()
    os.utime(old, times=(time.time() - 3600,) * 2)
    compiled(source(tmp_path, "int answer();"), "test1", [])
    assert not old.exists()
    assert young.exists(), "somebody may be at it"
