"""`poseidon bench priority`: what it measures on small inputs, the papers' figures beside it, and wrong input."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from poseidon.bench.network_options import network_words
from poseidon.bench.priority.cost import measure_costs
from poseidon.bench.priority.tables import PAPER_EFFICIENCIES, GridConfig, GridRun
from poseidon.bench.priority.urgent import UrgentConfig, run_urgent
from poseidon.bench.training.methods import METHODS, parse_methods
from poseidon.bench.training.results import MethodResult, TrainResult
from poseidon.cli.main import app
from poseidon.cli.network import Congestion, Switches, network_arguments
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.options import resolve
from poseidon.testbed import missing_requirements

BENCH = Path(__file__).resolve().parents[2] / "bench"
needs_testbed = pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")


def entry(
    method: str, seconds: float, closed_form_bytes: float = 0.0, bound_seconds: float | None = None
) -> MethodResult:
    return MethodResult(
        method=method,
        step_seconds=[seconds],
        iteration_seconds=seconds,
        efficiency=1.0 / seconds,
        speedup=8 / seconds,
        samples_per_second=1.0,
        closed_form_bytes=closed_form_bytes,
        payload_bytes=None,
        interface_bytes=closed_form_bytes,
        interface_bytes_max=closed_form_bytes,
        bound_seconds=bound_seconds,
    )


def trained(*entries: MethodResult, tcp_copy: float | None = 100e6, model: str = "VGG19") -> TrainResult:
    return TrainResult(model, 8, "156.25mbit", 4, 1.0, 1, 16, tcp_copy, list(entries))


def test_bounds_are_efficiencies_and_shares_of_the_bounds_speed() -> None:
    without, slow = entry("none", 1.0, bound_seconds=1.0), entry("geryon", 2.5, 50e6, bound_seconds=2.0)
    result = trained(without, slow)
    assert result.bound(slow) == pytest.approx(0.5)
    assert result.of_bound(slow) == pytest.approx(0.8)
    unshaped = entry("geryon", 2.5, 50e6)
    assert result.bound(unshaped) is None
    assert result.of_bound(unshaped) is None
    documents = result.to_json()["methods"]
    assert [document["bound"] for document in documents] == pytest.approx([1.0, 0.5])
    assert [document["of_bound"] for document in documents] == pytest.approx([1.0, 0.8])
    assert [document["bound_seconds"] for document in documents] == [1.0, 2.0]


def test_a_table_says_what_is_special_about_the_network() -> None:
    assert network_words({}) == "FIFO switches, reno"
    assert network_words(network_arguments(2, Switches.honour)) == "switches honour DSCP, reno"
    assert network_words(network_arguments(2, Switches.honour, host_ports=Switches.ignore)) == (
        "switches honour DSCP, FIFO host ports, reno"
    )
    assert network_words(network_arguments(2, Switches.ignore, 2, 4.0, Congestion("bbr"), 20.0)) == (
        "2 racks, oversubscribed 4:1, FIFO switches, queues of 20 ms, bbr"
    )


def test_ports_stand_for_the_papers() -> None:
    config = GridConfig()
    assert [config.link(rate) for rate in (2.5, 10, 40)] == ["39.0625mbit", "156.25mbit", "625mbit"]
    assert replace(config, scale=1, stretch=1).link(10) == "10gbit"


def test_grid_runs_every_combination_at_the_k40s_times() -> None:
    runs = list(GridConfig(models=("AlexNet", "YOLO"), gigabits_per_second=(10.0,), host_counts=(1, 8)).runs())
    assert [(run.model, run.host_count) for _, run in runs] == [
        ("AlexNet", 1),
        ("AlexNet", 8),
        ("YOLO", 1),
        ("YOLO", 8),
    ]
    assert [method.name for method in runs[0][1].methods] == ["none"]
    assert [method.name for method in runs[1][1].methods] == ["none", "vanilla", "slicing", "geryon"]
    assert runs[1][1].table.batch == 512 // 4
    assert runs[2][1].compute_seconds == pytest.approx(4 * 1.79, rel=0.01)


def test_paper_figures_stand_beside_their_own_runs_only() -> None:
    result = trained(entry("none", 1.0), entry("geryon", 1.1), entry("overlap-ps", 1.1))
    none, geryon, overlap = result.methods
    assert GridRun(10.0, result).paper_efficiency(geryon) == 0.946
    assert GridRun(40.0, result).paper_efficiency(geryon) == 0.948
    assert GridRun(10.0, result).paper_efficiency(none) is None
    assert GridRun(10.0, result).paper_efficiency(overlap) is None
    assert GridRun(25.0, result).paper_efficiency(geryon) is None
    assert GridRun(10.0, replace(result, hosts=4)).paper_efficiency(geryon) is None
    assert all(0 < share < 1 for table in PAPER_EFFICIENCIES.values() for row in table.values() for share in row)


@pytest.mark.parametrize("name", METHODS)
def test_options_of_every_method_exist(name: str) -> None:
    options = METHODS[name].scaled(4).options
    settings = resolve(rank=0, world_size=1, **options)
    for option in options:
        assert settings.sources[option] == "keyword"


def test_slices_shrink_with_the_weights() -> None:
    (_, slicing, partition, overlap) = parse_methods("slicing,partition,overlap")
    assert slicing.scaled(4).options["chunk_bytes"] == (4 << 20) // 16
    assert slicing.scaled(1000).options["chunk_bytes"] == 64
    assert partition.scaled(1).options["chunk_bytes"] == 1 << 34
    assert "chunk_bytes" not in overlap.scaled(4).options
    assert slicing.options.items() < slicing.scaled(4).options.items()


@needs_testbed
def test_urgent_tensor_overtakes_only_with_classes_in_the_network() -> None:
    steps: list[tuple[int, int]] = []
    config = UrgentConfig("100mbit", 1 << 20, 8 << 20, 3, timeout_seconds=30)
    result = run_urgent(config, lambda _, done, total: steps.append((done, total)))
    assert steps == [(index, 4) for index in range(4)]
    assert [(delay.honour_dscp, delay.classes) for delay in result.delays] == [
        (True, 1),
        (True, 2),
        (False, 1),
        (False, 2),
    ]
    for delay in result.delays:
        assert len(delay.alone_seconds) == len(delay.loaded_seconds) == 3
        assert min(delay.alone_seconds) >= 0.9 * config.urgent_seconds
    assert result.delay(True, 2).ratio < 1.4
    for honour_dscp in (True, False):
        assert result.delay(honour_dscp, 1).ratio > 1.5
    assert result.to_json()["delays"][1]["ratio"] == result.delay(True, 2).ratio


@needs_testbed
def test_urgent_says_when_the_bulk_tensor_is_too_small() -> None:
    with pytest.raises(PoseidonError, match="make it larger"):
        run_urgent(UrgentConfig("100mbit", 4 << 20, 4096, 1, timeout_seconds=30))


def test_urgent_refuses_empty_tensors() -> None:
    with pytest.raises(InvalidArgument, match="at least 4 bytes"):
        run_urgent(UrgentConfig("100mbit", 0, 1 << 20, 1))


def test_cost_is_measured_for_every_count() -> None:
    result = measure_costs([100, 10_000], layer_count=10, repeat_count=3)
    assert [entry.chunk_count for entry in result.costs] == [100, 10_000]
    for measured in result.costs:
        assert len(measured.seconds) == 3
        assert 0 < measured.seconds_per_chunk < 1e-3
    with pytest.raises(InvalidArgument, match="at least 1"):
        measure_costs([], 10, 1)


def test_cost_command_prints_json_and_a_table() -> None:
    arguments = ["bench", "priority", "cost", "--chunks", "320", "--layers", "4", "--repeats", "1"]
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    (document,) = json.loads(answer.stdout)
    assert (document["layer_count"], document["costs"][0]["chunk_count"]) == (4, 320)
    assert "each, µs" in CliRunner().invoke(app, arguments).stdout


@needs_testbed
def test_tables_command_prints_the_paper_beside_the_measured() -> None:
    arguments = ["bench", "priority", "tables", "--model", "AlexNet", "--gigabits", "40", "--hosts", "2"]
    arguments += ["--scale", "16", "--stretch", "0.2", "--steps", "1", "--repeats", "1", "--methods", "geryon"]
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    ((run,),) = [document["runs"] for document in json.loads(answer.stdout)]
    assert (run["model"], run["device"], run["gigabits_per_second"], run["hosts"]) == ("AlexNet", "k40", 40.0, 2)
    none, geryon = run["methods"]
    assert none["iteration_seconds"] >= 0.1
    assert 0 < geryon["efficiency"] < 1.5
    assert 0 < geryon["bound"] <= 1
    assert geryon["paper_efficiency"] is None


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["urgent", "--urgent-bytes", "big"], "must be a size"),
        (["tables", "--threshold", "2"], "from 0 to 1"),
        (["tables", "--model", "VGG20"], "known are"),
        (["scaling", "--methods", "horovod"], "known are"),
    ],
)
def test_commands_refuse_wrong_input(wrong: list[str], complaint: str) -> None:
    answer = CliRunner().invoke(app, ["bench", "priority", *wrong])
    assert answer.exit_code != 0
    assert complaint in str(answer.exception)


@pytest.fixture(scope="module")
def bars() -> ModuleType:
    spec = importlib.util.spec_from_file_location("priority_bars", BENCH / "priority_bars.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bars_ask_for_the_bound_where_it_is_below(bars: ModuleType) -> None:
    def judged(measured: float, bound: float | None) -> bool:
        return bars.Judged("run", "what", measured, 0.95, bound=bound).met

    assert judged(0.96, 1.0)
    assert not judged(0.94, 1.0)
    assert judged(0.78, 0.80)
    assert not judged(0.77, 0.80)
    assert not judged(0.94, None)
    assert bars.Judged("run", "what", 1.1, 1.15, at_least=False).met
    assert not bars.Judged("run", "what", 1.2, 1.15, at_least=False).met
    assert "(97.5% of the bound)" in str(bars.Judged("run", "what", 0.78, 0.95, bound=0.80))


def test_bars_cover_the_table(bars: ModuleType) -> None:
    cases = list(bars.cases())
    assert len({case.title for case in cases}) == len(cases)
    asked = {(case.group, case.model, case.link): case.efficiency for case in cases}
    for model in ("AlexNet", "VGG19", "ResNet-50", "YOLO"):
        assert asked["K40", model, "156.25mbit"] == 0.97
        assert asked["K40", model, "625mbit"] == 0.98
    assert asked["K40", "VGG19", "39.0625mbit"] == asked["K40", "AlexNet", "39.0625mbit"] == 0.95
    assert asked["Titan X", "VGG19-22K", "31.25mbit"] == 0.95
    assert asked["Titan X", "ResNet-50", "31.25mbit"] == 0.79
    (balanced,) = [case for case in cases if case.group == "K40 balanced"]
    assert balanced.others == (("wfbp-ps", 1.2),)
    assert all("ddp" in dict(case.others) for case in cases if case is not balanced)


def test_bars_judge_a_run(bars: ModuleType) -> None:
    case = next(case for case in bars.cases() if case.model == "ResNet-50" and case.link == "31.25mbit")
    mine, ddp = entry("overlap", 2.55, bound_seconds=2.5), entry("ddp", 4.0)
    mine = replace(mine, efficiency=2 / 2.55)
    efficiency, speed = case.judge(trained(entry("none", 2.0), mine, ddp))
    assert (efficiency.bound, efficiency.met) == (pytest.approx(0.8), False)
    assert speed.met
    assert speed.measured == pytest.approx(4 / 2.55)


def test_bars_script_measures_what_it_is_asked_for() -> None:
    command = [sys.executable, str(BENCH / "priority_bars.py"), "--only", "scheduling", "--repeats", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    heading, *lines = answer.stdout.splitlines()
    assert heading.split() == ["run", "what", "measured", "bar", "bound"]
    assert [line.split()[:2] for line in lines] == [["scheduling", "cost"]] * 6
    assert "µs per chunk of 1000000" in lines[-1]
