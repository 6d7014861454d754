"""What other users and other runs leave where this machine's workers are watched: two runs of one name, and files that
no worker has written."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flight_records import record, write
from poseidon import live
from poseidon.doctor import group, load
from poseidon.errors import InvalidArgument
from poseidon.live import WorkerFigures, read_boards
from poseidon.watch import metrics_text, tables
from test_watch import Shown, worker

TIMES = [0.1, 0.2, 0.3]
DEEP = "[" * 200_000 + "]" * 200_000
COLOUR = "\x1b[31mred\x1b]0;title\x07"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live, "_base", lambda: tmp_path)
    return tmp_path


def shown(figures: list[WorkerFigures]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for table in tables(figures):
            console.print(table)
    return capture.get()


def test_two_runs_of_one_job_name_are_two_tables_and_two_series() -> None:
    first = [worker(rank, TIMES, world_size=2) for rank in (0, 1)]
    second = [replace(one, run="8d2e", step=7) for one in first]
    mixed = sorted(first + second, key=lambda one: (one.run_key, one.rank))
    text = shown(mixed)
    assert text.count("2 of 2 workers") == 2
    assert "4 of 2" not in text
    assert "run 5c1f" in text
    assert "run 8d2e" in text
    samples = [line.rpartition(" ")[0] for line in metrics_text(mixed).splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)), "a series would have two values"
    assert "run" not in shown(first), "one run needs no more than its job's name"


def with_digest(content: str) -> bytes:
    text = content.encode()
    return b"%08x\n" % zlib.crc32(text) + text


def changed(**changes: Any) -> str:
    return json.dumps({**asdict(worker(0, TIMES)), **changes})


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        "[]",
        "{}",
        "null",
        changed(rank="0"),
        changed(step_s=float("nan")),
        changed(written_at=None),
        changed(layers=7),
        changed(layers=[[]]),
        changed(links=[{"peer": 3}]),
        changed(job=["x"]),
        changed(more="x"),
    ],
)
def test_a_file_that_no_worker_has_written_is_not_read(base: Path, content: str) -> None:
    process = Shown(worker(1, TIMES))
    try:
        mine = next((base / f"poseidon-{os.getuid()}").iterdir())
        other = Shown(None)
        (path,) = set(mine.parent.iterdir()) - {mine}
        path.write_bytes(with_digest(content))
        assert [one.rank for one in read_boards()] == [1]
        other.vanish()
    finally:
        process.vanish()


def test_a_pipe_a_link_and_a_folder_stop_nobody(base: Path) -> None:
    folder = base / f"poseidon-{os.getuid()}"
    process = Shown(worker(1, TIMES))
    try:
        os.mkfifo(folder / "1-pipe")
        (folder / "2-link").symlink_to(next(one for one in folder.iterdir() if one.is_file()))
        (folder / "3-folder").mkdir()
        found: list[Any] = []
        looking = threading.Thread(target=lambda: found.append(read_boards()), daemon=True)
        looking.start()
        looking.join(5)
        assert not looking.is_alive(), "it waits for who writes into the pipe"
        assert [one.rank for one in found[0]] == [1]
    finally:
        process.vanish()


def test_names_cannot_colour_a_terminal_or_break_a_line() -> None:
    figures = WorkerFigures.from_json(json.loads(changed(job=COLOUR, host="a\nb", run="\u202e")))
    assert figures.job == "?[31mred?]0;title?"
    text = shown([figures]) + metrics_text([figures])
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert figures.host == "a?b"


def test_records_of_strangers_cannot_stop_or_colour_the_doctor(tmp_path: Path) -> None:
    write(tmp_path, record(0, "own", message=COLOUR))
    os.mkfifo(tmp_path / "poseidon-pipe.json")
    (tmp_path / "poseidon-deep.json").write_text(DEEP)
    (tmp_path / "poseidon-list.json").write_text("[1]")
    for number, changes in enumerate(
        [{"world_size": 10**12}, {"job": ["x"]}, {"wall_s": 1e300}, {"rank": 10**9}, {"links": [{}]}, {"host": None}]
    ):
        content = {**record(1, "own"), **changes}
        (tmp_path / f"poseidon-hostile{number}.json").write_text(json.dumps(content))
    begin = time.monotonic()
    (one,) = group(load([tmp_path]))
    assert time.monotonic() - begin < 5
    assert [found.rank for found in one] == [0]
    assert "\x1b" not in one[0].message
    with pytest.raises(InvalidArgument, match=r"poseidon-hostile0.json is damaged .ValueError: world_size is 10"):
        load([tmp_path / "poseidon-hostile0.json"])
    with pytest.raises(InvalidArgument, match="it is no file"):
        load([tmp_path / "poseidon-pipe.json"])
