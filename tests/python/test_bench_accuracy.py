"""bench/accuracy.py trains each choice, prints what it found, and judges int8 by the spread of fp32's seeds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forked import run_script

pytest.importorskip("poseidon._core")
BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = [
    "--tasks",
    "dlrm",
    "--choices",
    "fp32",
    "bf16",
    "int8",
    "local-sgd",
    "--seeds",
    "1",
    "--steps",
    "32",
    "--segment",
    "16",
]


def run(folder: Path, *arguments: str) -> str:
    (output,) = run_script([str(BENCH / "accuracy.py"), *arguments], [dict(os.environ)], folder, timeout_s=120)
    return output


def test_losses_fall_under_every_choice(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    document = json.loads(run(tmp_path, *TINY, "--json", "--plot", str(picture)))
    assert [(curve["choice"], curve["seed"]) for curve in document["curves"]] == [
        ("fp32", 0),
        ("bf16", 0),
        ("int8", 0),
        ("local-sgd", 0),
    ]
    for curve in document["curves"]:
        (step, seconds, loss, accuracy), (last_step, all_seconds, last_loss, last_accuracy) = curve["points"]
        assert (step, last_step) == (16, 32)
        assert 0 < seconds < all_seconds
        assert last_loss < loss
        assert 0.4 < accuracy < 1
        assert 0.4 < last_accuracy < 1
    fp32, bf16, int8, local_sgd = (curve["points"][-1][2] for curve in document["curves"])
    assert int8 == pytest.approx(fp32, rel=0.01)
    assert len({fp32, bf16, int8, local_sgd}) == 4  # each choice is in effect
    assert document["int8_met"] == {}  # one seed has no spread
    assert picture.read_text().count("<polyline") == 2 * 4


def test_the_table_has_a_line_for_each_choice(tmp_path: Path) -> None:
    lines = run(tmp_path, *TINY).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = ["task", "choice", "steps", "final loss", "final accuracy %", "against fp32", "spread", "seconds"]
    assert cells[0] == heads
    assert [row[1] for row in cells[2:]] == ["fp32", "bf16", "int8", "local-sgd"]
    assert all(row[2] == "32" and 0 < float(row[3]) < 1 for row in cells[2:])
    assert all(40 < float(row[4]) < 100 and float(row[7]) > 0 for row in cells[2:])


def test_int8_is_judged_by_the_spread_of_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import accuracy

    def curves(choice: str, *finals: float) -> list[accuracy.Curve]:
        return [accuracy.Curve("cnn", choice, seed, [(8, 0.5, 1.0, final)]) for seed, final in enumerate(finals)]

    exact = curves("fp32", 0.80, 0.81, 0.83)
    assert accuracy.verdicts(exact + curves("int8", 0.79, 0.80, 0.80)) == {"cnn": True}
    assert accuracy.verdicts(exact + curves("int8", 0.77, 0.78, 0.79)) == {"cnn": False}
    assert accuracy.verdicts(exact + curves("int8", 0.85, 0.85, 0.85)) == {"cnn": False}
    assert accuracy.verdicts(curves("fp32", 0.80) + curves("int8", 0.10)) == {}


def test_segments_end_where_local_sgd_averages(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with \[2\]:[\s\S]*multiple of 8"):
        run(tmp_path, "--segment", "12")
