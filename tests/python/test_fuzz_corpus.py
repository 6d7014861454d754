"""The fuzzers' corpora are of the present formats: they are what their generator writes."""

from __future__ import annotations

import runpy
from pathlib import Path

FUZZ = Path(__file__).parents[1] / "fuzz"


def test_the_corpora_are_what_the_generator_writes() -> None:
    corpora = runpy.run_path(str(FUZZ / "make_corpus.py"))["corpora"]()
    assert set(corpora) == {"decode", "messages", "tcp_receive", "lossless", "checkpoint"}
    for folder, files in corpora.items():
        written = {path.name: path.read_bytes() for path in (FUZZ / "corpus" / folder).iterdir()}
        assert written == files, f"run tests/fuzz/make_corpus.py again for {folder}"
