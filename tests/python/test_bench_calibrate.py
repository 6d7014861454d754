"""`poseidon bench calibrate`: what it measures is a cluster file that plans take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.bench.exchange import calibrate
from poseidon.bench.exchange.calibrate import Calibration
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument
from poseidon.planner.cluster import Setting, make_cluster, read_settings

FOUND = Calibration(2, 2.5e9, 1e9, 0.0002, 1.5e10)


def test_the_file_is_a_cluster_once_hosts_and_link_are_given(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FOUND.toml().replace("# products", "products"), "utf-8")
    given = {"hosts": Setting(4, "--hosts"), "link": Setting("10gbit", "--link")}
    cluster = make_cluster(read_settings(path) | given)
    assert (cluster.latency_s, cluster.memory_bytes_per_s, cluster.products_per_s) == (0.0002, 2.5e9, 1.5e10)
    assert "8.0 Gb/s in each direction" in FOUND.toml()


@pytest.mark.parametrize(
    ("line", "words"), [("products = 0", "products is 0: it must be above 0"), ('products = "1"', "must be a number")]
)
def test_wrong_products_are_told_with_their_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'hosts = 2\nlink = "1gbit"\n{line}\n', "utf-8")
    with pytest.raises(InvalidArgument, match=rf"line 3: .*{words}"):
        make_cluster(read_settings(path))


def test_it_measures_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_STEPS", 2)
    monkeypatch.setattr(calibrate, "_ROUNDS", 1)
    path = tmp_path / "cluster.toml"
    done = CliRunner().invoke(app, ["bench", "calibrate", "--out", str(path), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert 0.001 < found["latency_ms"] < 100
    assert 0.01 < found["host_memory"] < 1000
    assert 0.1 < found["products"] < 10_000
    assert f"latency_ms = {found['latency_ms']:g}" in path.read_text("utf-8")
    again = CliRunner().invoke(app, ["bench", "calibrate", "--out", str(path)])
    assert isinstance(again.exception, InvalidArgument) or "exists: name another file" in again.output


@pytest.mark.parametrize(
    ("command", "option", "name", "measures"),
    [
        ("calibrate", "--out", "no/folder/c.toml", "exchange.calibrate.measured"),
        ("exchange", "--plot", "no/folder/plot.svg", "exchange.cli.run_exchange"),
        ("train", "--plot", "no/folder/plot.svg", "training.cli.run_training"),
        ("suite", "--out", "file/suite", "suite.cli.measure"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str, name: str, measures: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(f"poseidon.bench.{measures}", lambda *_: pytest.fail("it has measured"))
    model = ["--model", "VGG19"] if option == "--plot" else []
    done = CliRunner().invoke(app, ["bench", command, *model, option, str(tmp_path / name)])
    assert isinstance(done.exception, InvalidArgument), done.output
    assert str(done.exception).startswith(f"{option} {tmp_path / name} cannot be written: ")
