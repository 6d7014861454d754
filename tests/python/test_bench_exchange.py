"""`poseidon bench exchange`: two workers on loopback; what it measures, checks, reports and refuses."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from poseidon.bench.exchange import host as exchange_host
from poseidon.bench.exchange import run as exchange_run
from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.engine import BenchmarkJob, Engine
from poseidon.bench.exchange.engines import CopyEngine, missing_mpi
from poseidon.bench.exchange.host import ExchangeHost, Round
from poseidon.bench.exchange.methods import (
    PLACEMENTS,
    ExchangeMethod,
    Library,
    parse_methods,
    parse_placement,
    parse_workload,
)
from poseidon.bench.exchange.plot import exchange_plot
from poseidon.bench.exchange.results import ExchangeConfig, ExchangeMethodResult, ExchangeResult, Measured, summarize
from poseidon.bench.exchange.run import run_exchange
from poseidon.bench.hosts.fleet import LOOPBACK, Place
from poseidon.bench.hosts.measures import interface_counters
from poseidon.bench.hosts.server import settings_on
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.launch import free_port
from poseidon.models import model_table, scaled
from poseidon.testbed import missing_requirements

SVG = "{http://www.w3.org/2000/svg}"
SMALL = "tensors:3x40000"

needs_root = pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")


def config(methods: list[ExchangeMethod], model: str = SMALL, placement: str = "cs", **changes: Any) -> ExchangeConfig:
    given: dict[str, Any] = {"worker_count": 2, "link": None, "step_count": 2, "repeat_count": 1, "timeout_seconds": 30}
    given |= changes
    workload = parse_workload(model, 4)
    return ExchangeConfig(workload=workload, placement=PLACEMENTS[placement], methods=methods, **given)


def measure(*arguments: Any, **changes: Any) -> dict[str, ExchangeMethodResult]:
    return {entry.method: entry for entry in run_exchange(config(*arguments, **changes)).methods}


def test_a_model_gives_its_parameter_tensors() -> None:
    workload = parse_workload("vgg19", 4)
    table = scaled(model_table("VGG19"), 4)
    assert workload.element_count == table.parameter_count
    assert workload.size_bytes == 4 * table.parameter_count
    assert len(workload.tensors) == 2 * len(table.layers)
    assert workload.name == "VGG19/4"


def test_synthetic_tensors_are_not_scaled() -> None:
    workload = parse_workload("tensors:10000x1KB", 4)
    assert (len(workload.tensors), workload.size_bytes, workload.largest_bytes) == (10000, 10_000_000, 1000)


@pytest.mark.parametrize("text", ["tensors:1x0", "tensors:0x1KB", "tensors:1x6", "tensors:1", "tensors:ax1KB"])
def test_synthetic_tensors_that_cannot_be(text: str) -> None:
    with pytest.raises(InvalidArgument, match="COUNTxBYTES"):
        parse_workload(text, 1)


@pytest.mark.parametrize(
    ("placement", "sent", "hosts", "servers"),
    [
        ("cs", 175, 8, 0),
        ("cc", 100, 8, 1),
        ("ncc", 100, 9, 1),
        ("ncs", 100, 16, 8),
        ("ncs:2", 400, 10, 2),
        ("ncs:9", 100, 17, 9),
    ],
)
def test_placements_are_those_of_figure_4_and_few_servers(
    placement: str, sent: float, hosts: int, servers: int
) -> None:
    place = parse_placement(placement)
    assert place.sent_bytes(100, 8) == sent
    assert (place.host_count(8), place.server_count(8)) == (hosts, servers)
    # An all-reduce moves the same wherever servers are.
    assert ExchangeMethod("gloo", "gloo").sent_bytes(place, 100, 8) == 175


def summed(divisor: int) -> Arrays:
    """What two workers should hold after warm-up step 1."""
    tensors = (("first", 700), ("second", 300))
    parts = [Arrays(tensors) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.fill(rank, 1)
    parts[0].flat[:] = (parts[0].flat + parts[1].flat) / divisor
    return parts[0]


@pytest.mark.parametrize("divisor", [1, 2])
def test_a_right_sum_passes(divisor: int) -> None:
    summed(divisor).check(1, worker_count=2, divisor=divisor)


def test_a_wrong_element_is_named() -> None:
    arrays = summed(1)
    arrays.tensors[1][7] += 1
    with pytest.raises(PoseidonError, match="element 7 of second"):
        arrays.check(1, worker_count=2, divisor=1)


@pytest.mark.parametrize("wrong", [{"step": 0}, {"worker_count": 3}, {"divisor": 2}])
def test_a_sum_of_other_values_fails(wrong: dict[str, int]) -> None:
    with pytest.raises(PoseidonError, match="element 0 of first"):
        summed(1).check(**{"step": 1, "worker_count": 2, "divisor": 1, **wrong})


class Local(Engine):
    """Does to the arrays of worker 0 of one what `action` does."""

    divisor = 1

    def __init__(self, action: Any) -> None:
        self._action = action
        self.kept: list[np.ndarray] = []

    def connect(self) -> None: ...

    def step(self) -> None:
        self._action(self)

    def close(self) -> None: ...


def local_host(monkeypatch: pytest.MonkeyPatch, action: Any, world: int = 1) -> ExchangeHost:
    monkeypatch.setattr(exchange_host, "make_engine", lambda *_: Local(action))
    method = ExchangeMethod("local", "poseidon")
    return ExchangeHost(BenchmarkJob(method, (("only", 1000),), [LOOPBACK] * world, [0] * world, 0, 10.0), 0)


def test_warm_up_finds_an_exchange_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    local_host(monkeypatch, lambda _: None).prepare(2)  # right for one worker
    with pytest.raises(PoseidonError, match="the exchange is wrong"):
        local_host(monkeypatch, lambda _: None, world=2).prepare(2)


def test_memory_that_is_kept_and_memory_that_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 << 20
    keeping = local_host(monkeypatch, lambda engine: engine.kept or engine.kept.append(np.ones(size, np.uint8)))
    keeping.prepare(1)
    kept = keeping.measure(2)
    assert size * 0.9 < kept.grown_bytes < size * 1.5
    freeing = local_host(monkeypatch, lambda _: np.ones(size, np.uint8))
    freeing.prepare(1)
    freed = freeing.measure(2)
    assert freed.peak_bytes > size * 0.9
    assert freed.grown_bytes < size * 0.5


def test_processor_time_is_that_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def burn(_: Any) -> None:
        start = time.process_time()
        while time.process_time() - start < 0.02:
            pass

    host = local_host(monkeypatch, burn)
    host.prepare(1)
    measured = host.measure(4)
    assert len(measured.ends) == 5
    assert 0.1 <= measured.cpu_seconds < 0.2


def test_peers_take_turns_and_are_compared() -> None:
    pytest.importorskip("torch")
    calls: list[str] = []
    chosen = parse_methods("gloo,tcp-copy,tcp-stream")
    result = run_exchange(config(chosen, repeat_count=2), lambda method, *_: calls.append(method))
    assert calls == ["gloo", "tcp-copy", "tcp-stream"] * 2
    gloo, copy, _ = result.methods
    assert result.size_bytes == 120000
    assert len(gloo.step_seconds) == 4
    assert gloo.cpu_seconds_per_gb > 0
    assert (gloo.gloo_ratio, copy.copy_ratio) == (1.0, 1.0)


def test_ratios_are_those_within_a_turn() -> None:
    def turn(seconds: float) -> Measured:
        return Measured([Round([0.0, seconds], 0.5, 200_000, 300_000, [500, 700], 2)] * 2, 1.0, 3)

    # The machine is ten times slower in the second turn and hits only one method in the third.
    rounds = {
        "poseidon": [turn(2.0), turn(20.0), turn(50.0)],
        "gloo": [turn(4.0), turn(40.0), turn(4.0)],
        "tcp-copy": [turn(1.0), turn(10.0), turn(1.0)],
    }
    chosen = parse_methods("poseidon,gloo,tcp-copy")
    here = config(chosen, step_count=1, repeat_count=3)
    poseidon, gloo, copy = summarize(here, chosen, rounds, {}).methods
    assert (poseidon.gloo_ratio, poseidon.copy_ratio, copy.gloo_ratio) == (2.0, 0.5, 4.0)
    assert poseidon.median_seconds == 20.0
    assert poseidon.goodput_bits_per_second == 8 * 120_000 / 20
    # 2 seconds per turn, for 2 workers' 2 steps of 120 000 bytes; a hosted shard of half the bytes is not counted.
    assert poseidon.cpu_seconds_per_gb == pytest.approx(2 / (4 * 120_000 / 1e9))
    assert (poseidon.memory_bytes, poseidon.memory_peak_bytes) == (140_000, 240_000)
    assert gloo.memory_bytes == 200_000
    assert gloo.port_sent_bytes == []  # the loopback is everybody's
    shaped = config(chosen, step_count=1, repeat_count=3, link="1gbit")
    # By two workers in each of the two steps, of which the lead-in is one.
    assert summarize(shaped, chosen, rounds, {}).methods[1].port_sent_bytes == [250, 350]
    assert (gloo.timeouts, summarize(shaped, chosen, rounds, {}).methods[1].timeouts) == (None, 3 * 2 * 2)
    alone = config(chosen, placement="ncs", step_count=1, repeat_count=3, link="1gbit")  # servers have hosts, too
    assert summarize(alone, chosen, rounds, {}).methods[1].timeouts == 3 * (2 * 2 + 3)
    # With dedicated servers a worker sends less than in an all-reduce of more than two.
    apart = config(chosen, placement="ncs", worker_count=4, step_count=1, repeat_count=3)
    poseidon, gloo, _ = summarize(apart, chosen, rounds, {}).methods
    assert (poseidon.copy_ratio, gloo.copy_ratio) == (0.5, 0.25 * 1.5)
    assert poseidon.memory_bytes == 200_000


def test_the_copy_moves_what_a_worker_sends() -> None:
    before = interface_counters("lo")
    measure(parse_methods("tcp-copy"), "tensors:5x1MB", worker_count=3, step_count=4)
    moved = (interface_counters("lo") - before).sent
    steps = 4 + exchange_host.LEAD_IN_STEPS + 2  # of warm-up
    assert moved >= 3 * steps * 2 * 5_000_000 * 2 / 3


def loopback_ports(count: int) -> Place:
    return Place(None, tuple(f"127.0.0.{port + 1}" for port in range(count)), ("lo",) * count)


@pytest.mark.parametrize("kind", ["tcp-copy", "tcp-stream"])
def test_the_copy_splits_even_the_smallest_array_between_ports(kind: Library) -> None:
    places, ports = [loopback_ports(8)] * 2, [free_port(), free_port()]
    job = BenchmarkJob(ExchangeMethod(kind, kind), (("only", 1),), places, ports, 19, 10.0)
    engines = [CopyEngine(job, rank, Arrays(job.tensors)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(CopyEngine.connect, engines))
        before = interface_counters("lo")
        list(pool.map(CopyEngine.step, engines))
    # Each direction of each of the eight connections has its part: a packet of 40 bytes of headers at least.
    assert (interface_counters("lo") - before).sent >= 2 * 8 * 40 + 2 * 19
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("options", "cores"), [({}, 3), ({"server_cores": "7"}, 7), ({"interfaces": "127.0.0.2", "server_cores": "1"}, 1)]
)
def test_poseidon_uses_all_ports_with_as_many_cores_each(
    options: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSEIDON_SERVER_CORES", raising=False)
    monkeypatch.setattr(
        "poseidon.options.defaults.available_cpu_count", lambda: 8
    )  # for two cores of a server by default
    settings = settings_on(loopback_ports(3), options, rank=0, world_size=1)
    assert settings.server_cores == cores
    assert settings.interfaces == (("127.0.0.2",) if "interfaces" in options else ("lo", "lo", "lo"))
    alone = settings_on(LOOPBACK, {}, rank=0, world_size=1)
    assert (alone.interfaces, alone.server_cores) == ((), 2)


def test_mpi_is_checked_like_the_others() -> None:
    if reason := missing_mpi():
        pytest.skip(reason)
    entry = measure(parse_methods("mpi"))["mpi"]
    assert entry.median_seconds > 0
    assert entry.copy_ratio is None


def test_without_mpi_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_run, "missing_mpi", lambda: "not here")
    result = run_exchange(config(parse_methods("mpi,tcp-copy")))
    assert [entry.method for entry in result.methods] == ["tcp-copy"]
    assert result.skipped == {"mpi": "not here"}


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_poseidon_exchanges_in_every_placement(placement: str) -> None:
    pytest.importorskip("poseidon._core")
    entry = measure(parse_methods("poseidon"), "CIFAR-10 quick", placement)["poseidon"]
    assert entry.median_seconds > 0
    assert entry.sent_bytes == parse_workload("CIFAR-10 quick", 4).size_bytes


@needs_root
def test_a_central_server_is_as_slow_as_its_one_port() -> None:
    pytest.importorskip("poseidon._core")
    chosen = parse_methods("poseidon", ["chunk_bytes=50000"])
    seconds = {
        placement: measure(chosen, "tensors:1x1MB", placement, link="50mbit")["poseidon"].median_seconds
        for placement in ("ncc", "ncs")
    }
    one_array = 8e6 / 50e6
    assert seconds["ncc"] > 1.9 * one_array
    assert 0.9 * one_array < seconds["ncs"] < 1.6 * one_array


def test_each_value_of_a_sweep_is_a_method() -> None:
    chosen = parse_methods("poseidon", ["flows=2"], ["chunk_bytes=4k,64k"], ["aggregation"])
    assert [method.name for method in chosen] == [
        "poseidon",
        "chunk_bytes=4k",
        "chunk_bytes=64k",
        "aggregation=streaming",
        "aggregation=at_once",
        "aggregation=wide",
    ]
    assert chosen[1].options == {"transport": "tcp", "flows": "2", "chunk_bytes": "4k"}
    assert [method.swept for method in chosen[:2]] == [None, "chunk_bytes"]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (["--model", "VGG20"], "known are VGG19"),
        (["--model", "tensors:2xlarge"], "COUNTxBYTES"),
        (["--model", SMALL, "--methods", "horovod"], "known are poseidon"),
        (["--model", SMALL, "--placement", "css"], "known are cs, cc, ncc, ncs"),
        (["--model", SMALL, "--placement", "ncs:0"], "known are cs, cc, ncc, ncs, ncs:N"),
        (["--model", SMALL, "--option", "chunk=4k"], "did you mean chunk_bytes"),
        (["--model", SMALL, "--option", "chunk_bytes=4q"], "it must be"),
        (["--model", SMALL, "--sweep", "flows="], "NAME=VALUE,VALUE"),
        (["--model", SMALL, "--sweep", "flows=1,x"], "it must be"),
        (["--model", SMALL, "--ablation", "tall"], "known are aggregation"),
        (["--model", SMALL, "--link", "fast"], "the link rate"),
        (["--model", SMALL, "--hosts", "1"], "at least 2"),
        (["--model", SMALL, "--ports", "2"], "the loopback has one"),
        (["--model", SMALL, "--methods", ","], "nothing to measure"),
    ],
)
def test_command_refuses_what_it_does_not_know(wrong: list[str], hint: str) -> None:
    answer = CliRunner().invoke(app, ["bench", "exchange", *wrong])
    assert answer.exit_code != 0
    assert isinstance(answer.exception, InvalidArgument), answer.output
    assert hint in str(answer.exception)


def test_command_prints_json_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("poseidon._core")
    plot = tmp_path / "plot.svg"
    arguments = ["bench", "exchange", "--model", SMALL, "--methods", "poseidon,tcp-copy", "--steps", "2"]
    arguments += ["--repeats", "1", "--sweep", "chunk_bytes=4k,16k"]
    answer = CliRunner().invoke(app, [*arguments, "--json", "--plot", str(plot)])
    assert answer.exit_code == 0, answer.output
    (document,) = json.loads(answer.stdout)
    assert (document["model"], document["hosts"], document["placement"]) == (SMALL, 2, "cs")
    names = [entry["method"] for entry in document["methods"]]
    assert names == ["poseidon", "tcp-copy", "chunk_bytes=4k", "chunk_bytes=16k"]
    assert {"step_seconds", "goodput_bits_per_second", "copy_ratio", "cpu_seconds_per_gb", "memory_bytes"} <= set(
        document["methods"][0]
    )
    assert len(ElementTree.fromstring(plot.read_text()).findall(f".//{SVG}circle")) == 2
    table = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert table.exit_code == 0
    assert "goodput" in table.stdout
    assert "chunk_bytes=16k" in table.stdout


def test_plot_has_a_bar_per_run_and_method_and_a_point_per_value() -> None:
    def entry(method: str, ratio: float, swept: str | None = None) -> ExchangeMethodResult:
        options = dict([method.split("=")]) if swept else {}
        return ExchangeMethodResult(method, options, swept, [1.0], 1.0, 1.0, 1e8 * ratio, ratio, None, 1.0, 0, 0)

    methods = [entry("poseidon", 0.98), entry("gloo", 0.9), entry("tcp-copy", 1.0)]
    methods += [entry(f"flows={count}", 0.9 + count / 100, "flows") for count in (1, 2, 4)]
    results = [ExchangeResult("VGG19/4", 38, 1, 1, 8, link, "cs", methods) for link in ("625mbit", "156mbit")]
    root = ElementTree.fromstring(exchange_plot(results))
    titles = {title.text for title in root.findall(f".//{SVG}rect/{SVG}title")}
    assert titles == {
        f"VGG19/4, 8 × {link}, cs, {method}"
        for link in ("625mbit", "156mbit")
        for method in ("poseidon: 0.980", "gloo: 0.900")
    }
    assert len(root.findall(f".//{SVG}circle")) == 6
