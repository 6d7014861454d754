"""`poseidon bench suite`: its groups, what it keeps, and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.bench.suite import cells as suite_cells
from poseidon.bench.suite import cli as suite_cli
from poseidon.bench.suite import grid
from poseidon.bench.suite.cells import Cell, append, load, measure, missing
from poseidon.bench.suite.grid import Group, groups, methods_of
from poseidon.bench.suite.page import markdown, rows_of, summary, write_page
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument
from poseidon.testbed import missing_requirements

needs_testbed = pytest.mark.skipif(bool(missing_requirements()), reason="shaped links need root and iproute2")
TINY = Group("CIFAR-10 quick", 1.0, 2)


def cell(method: str, step_s: float, cpu: float = 0.2, hosts: int = 2) -> Cell:
    return Cell("VGG19", 10.0, hosts, method, 2.0, 8, [step_s], step_s, 1 / step_s, 64 / step_s, 1e6, cpu)


@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_time_is_stretched_alike_for_computation_and_ports(slower: float) -> None:
    for group in groups(",".join(grid.MODELS), "1,10,25", "2,4,8", slower):
        config = group.config(methods_of("poseidon"))
        assert config.compute_seconds == pytest.approx(group.table.iteration_seconds * group.stretch)
        whole = group.gbit_per_s * 1e9 / grid.SCALE**2
        assert group.bits_per_second * group.stretch == pytest.approx(whole)
        ports_share = group.hosts * group.bits_per_second / (1e9 / slower)
        assert ports_share <= 1.001 or config.compute_seconds >= 0.99 * grid._LONGEST_STEP_S
        assert ports_share >= 0.999 or config.compute_seconds <= 1.001 * slower, "shortened as far as the cores allow"


def test_a_long_step_that_exchanges_little_is_not_stretched_for_its_port() -> None:
    group = Group("Llama-1B LoRA", 25.0, 8)
    assert group.config(methods_of("poseidon")).compute_seconds == pytest.approx(grid._LONGEST_STEP_S)
    assert group.hosts * group.bits_per_second > 1e9


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (("VGG", "1", "2"), "the suite has no models 'VGG': it has VGG19"),
        (("VGG19", "50", "2"), "the suite has no rates '50': it has 1, 10, 25, 40"),
        (("VGG19", "1", "3"), "the suite has no hosts '3'"),
        ((" ,", "1", "2"), "no models are given"),
    ],
)
def test_what_the_suite_does_not_have_is_told(lists: tuple[str, str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        groups(*lists)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Group] = []

    def take(group: Group, methods: object) -> list[Cell]:
        measured.append(group)
        return [replace(cell(name, 1.0), gbit_per_s=group.gbit_per_s) for name in ("none", "poseidon", "ddp")]

    monkeypatch.setattr(suite_cli, "measure", take)
    command = ["bench", "suite", "--models", "VGG19", "--hosts", "2", "--methods", "poseidon", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, [*command, "--rates", "1"]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--rates", "1,10"]).exit_code == 0
    assert [group.gbit_per_s for group in measured] == [1.0, 10.0]
    assert len(load(tmp_path)) == 6
    left = CliRunner().invoke(app, [*command, "--rates", "1,10,25", "--list"])
    assert "1 groups of 3 methods are left" in left.output
    assert (tmp_path / "suite.html").exists()


def test_a_line_that_is_no_cell_is_told(tmp_path: Path) -> None:
    append(tmp_path, [cell("ddp", 1.0)])
    with open(tmp_path / suite_cells.FILE, "a", encoding="utf-8") as file:
        file.write('{"model": 1}\n')
    with pytest.raises(InvalidArgument, match=r"cells\.jsonl, line 2 is no cell"):
        load(tmp_path)


def test_ratios_are_over_ddp_of_the_same_group_and_busy_ones_do_not_count(tmp_path: Path) -> None:
    cells = [cell("none", 1.0), cell("poseidon", 1.0), cell("ddp", 1.5), cell("ddp-fp16", 3.0)]
    rows = {row.method: row for row in rows_of(cells)}
    assert {name: row.over_ddp for name, row in rows.items()} == {"poseidon": 1.5, "ddp": 1.0, "ddp-fp16": 0.5}
    assert rows["poseidon"].step_s == 0.5, "on the clock of what is stood for"
    assert "1 groups: 1.50 to 1.50" in summary(rows_of(cells))
    busy = [cell("poseidon", 2.0, 0.9, 8), cell("ddp", 1.0, 0.9, 8)]
    assert summary(rows_of([*cells, *busy])) == summary(rows_of(cells))
    table = markdown([*cells, *busy]).splitlines()
    assert table[2] == "| VGG19 | 2 | 10 | 0.667 |  | 1.50 | 0.50 |"
    assert table[3] == "| VGG19 | 8 | 10 | 1.000 |  | 0.50* |  |"
    write_page(cells, tmp_path / "suite.html")
    assert "Efficiency of VGG19" in (tmp_path / "suite.html").read_text("utf-8")


def test_what_sends_bf16_stands_beside_the_hook_and_coding_has_a_column() -> None:
    coded = replace(cell("overlap", 1.0), plain_bytes=2e6, coded_bytes=1.7e6)
    table = markdown([coded, cell("ddp", 2.0), cell("ddp-bf16", 1.0), cell("server-bf16", 0.5)]).splitlines()
    assert table[0] == "| model | hosts | GbE | DDP's efficiency | coding | overlap | ddp-bf16 | server-bf16 |"
    assert table[2] == "| VGG19 | 2 | 10 | 0.500 | 0.85 | 2.00 | 2.00 | 4.00 (2.00) |"


def test_a_part_may_have_a_rate_and_methods_that_the_whole_has_not() -> None:
    assert [group.gbit_per_s for group in groups("VGG19", "40", "2")] == [40.0]
    assert [method.name for method in methods_of("overlap-plain")] == ["none", "overlap-plain", "ddp"]


@needs_testbed
def test_a_group_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "STEPS", 1)
    monkeypatch.setattr(grid, "_LONG_S", 0.0)  # one round
    methods = methods_of("poseidon")
    monkeypatch.setattr(suite_cells, "BUSY", 0.0)  # so it is measured again
    monkeypatch.setattr(suite_cells, "_MOST_SLOWER", 2.0)
    slower = replace(TINY, slower=2.0)
    append(tmp_path, measure(TINY, methods))
    found = load(tmp_path)
    assert not missing(TINY, methods, found)
    assert [one.method for one in found] == ["none", "poseidon", "ddp"]
    compute_s = slower.table.iteration_seconds * slower.stretch
    for one in found:
        assert one.stretch == slower.stretch > TINY.stretch
        assert one.step_s >= compute_s
        assert one.step_s >= one.port_bytes / 2 * 8 / slower.bits_per_second, "a port carries no faster"
        assert 0 < one.cpu <= 1
    assert found[0].port_bytes < found[1].port_bytes
    assert json.loads((tmp_path / suite_cells.FILE).read_text("utf-8").splitlines()[0])["method"] == "none"


def test_the_first_page_has_the_figures_of_its_raw_data_and_no_cell_that_the_processor_limits() -> None:
    root = Path(__file__).resolve().parents[2]
    cells = load(root / "bench" / "results" / "coding")
    page = (root / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+), (\d+) GbE \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for model, rate, figures in rows:
        group = Group(model, float(rate), 8)
        methods = ("ddp", "poseidon", "overlap", "server-bf16")
        for method, figure in zip(methods, figures.split(" | "), strict=True):
            found = [cell for cell in cells if (cell.group, cell.method) == (group, method)]
            assert figure in [f"{cell.efficiency:.2f}" for cell in found if not cell.limited]
