"""The command line as a user sees it: help, JSON, errors in one line, and quick to start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from poseidon.adapter.features import FEATURES
from poseidon.cli.lazy import lazy_group
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument
from poseidon.options import OPTIONS
from poseidon.rates import format_rate, parse_rate
from poseidon.testbed.shaping import Shape


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.output)


def test_run_takes_every_option() -> None:
    text = help_of("run")
    for option in OPTIONS:
        assert option.flag + " " in text


def test_server_takes_the_options_that_are_marked_for_it() -> None:
    text = help_of("server")
    shown = [option.name for option in OPTIONS if option.flag + " " in text]
    assert shown == [option.name for option in OPTIONS if option.on_server]


def test_baselines_have_a_panel_of_their_own() -> None:
    panel = help_of("run").split("Baselines: They reproduce the papers' figures.")[1].split("Example:")[0]
    shown = [option.name for option in OPTIONS if option.flag + " " in panel]
    assert shown == ["schedule", "partition", "aggregation", "reduce_order", "assignment", "priority_order"]


def test_options_say_their_values_and_where_these_come_from() -> None:
    result = CliRunner().invoke(app, ["options", "--json"], env={"POSEIDON_FLOWS": "3"})
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert list(rows) == [option.name for option in OPTIONS]
    assert (rows["flows"]["value"], rows["flows"]["source"], rows["flows"]["default"]) == (3, "environment", 1)
    assert "chunk_bytes" in CliRunner().invoke(app, ["options"]).output


def test_the_page_of_options_is_what_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    printed = CliRunner().invoke(app, ["options", "--markdown"]).output
    assert page.read_text(encoding="utf-8") == printed, "run: poseidon options --markdown > docs/options.md"


def test_features_say_what_they_exclude() -> None:
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["features", "--json"]).output)}
    assert rows.keys() == FEATURES.keys()
    assert {"ssp", "rejoin", "wide", "join"} <= set(rows["drop"]["excludes"])
    assert rows["max_norm"]["excludes"] == ["update_server", "sparse"]
    assert "stragglers=wait" in CliRunner().invoke(app, ["features"]).output


def test_the_page_of_features_is_what_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "features.md"
    printed = CliRunner().invoke(app, ["features", "--markdown"]).output
    assert page.read_text(encoding="utf-8") == printed, "run: poseidon features --markdown > docs/features.md"


def test_help_loads_neither_torch_nor_the_benchmarks() -> None:
    program = (
        "import sys\nfrom poseidon.cli import main\nsys.argv = ['poseidon', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'poseidon._core', 'poseidon.bench.cli') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "bench" in done.stdout
    assert done.stdout.rstrip().endswith("[]")


def test_lazy_group_keeps_one_command_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_commands.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef train(count: int = 1): print('train', count)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    root = typer.Typer()
    root.callback()(lambda: None)
    root.add_typer(typer.Typer(), name="bench", cls=lazy_group("late_commands"))
    result = CliRunner().invoke(root, ["bench", "train", "--count", "3"])
    assert (result.exit_code, result.output) == (0, "train 3\n")
    assert "train" in CliRunner().invoke(root, ["bench", "--help"]).output


def test_version_as_json() -> None:
    result = CliRunner().invoke(app, ["version", "--json"])
    assert {"poseidon", "torch", "numpy", "python", "system"} == set(json.loads(result.output))


def test_an_error_is_one_line_and_status_one() -> None:
    command = [sys.executable, "-m", "poseidon", "run", "--chunk-bytes", "12x", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"poseidon: --chunk-bytes is '12x': it must be .*\n", done.stderr)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1gbit", 10**9), ("31.25mbit", 31_250_000), ("500kbit", 500_000), ("100000bit", 100_000)]
    + [(text, 10**10) for text in ("10gb", "10Gb", "10 Gb/s", "10gbps", "10G", "10GbE", "10 gbit/s", "10Gbits")],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "100", "100 MB", "-1mbit", "1e3mbit", "0mbit", "1tbit", "1bit", "200gbit"])
def test_bad_rates(text: str) -> None:
    with pytest.raises(InvalidArgument, match="the link rate is"):
        parse_rate(text)


def test_bytes_are_told_from_bits() -> None:
    with pytest.raises(InvalidArgument, match=r"'10GB', which is bytes: .*give 80gbit for it, or 10gbit if you mean b"):
        parse_rate("10GB")


def test_shape_grows_with_the_rate() -> None:
    slow, fast = Shape(31_250_000), Shape(10**9)
    assert slow.burst_bytes == 16 << 10
    assert slow.queue_bytes == 1 << 20
    assert slow.segment_bytes == 3906
    assert fast.burst_bytes == 125_000
    assert fast.queue_bytes == 9_375_000
    assert fast.segment_bytes == 65536
    assert Shape(10**5, mtu=9000).burst_bytes >= 2 * 9014
