"""Predicted steps: against formulas, the bound and measurements, and by class against message by message."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core")

from closed_forms import bytes_per_worker
from poseidon.bench.training.bound import least_step_seconds
from poseidon.errors import InvalidArgument
from poseidon.models import LayerSpec, ModelTable, model_table, scaled
from poseidon.planner import ClusterSpec, Exchange, Planner, Prediction
from poseidon.planner.trace import write_prediction

COMPUTE_S = 3.0  # forward 1, backward 2
EXACT = Exchange(by_time=False)


def network(*flops: float, size: int = 1000, kind: str = "conv") -> ModelTable:
    layers = tuple(LayerSpec(f"layer{index}", kind, (size, size), False, share) for index, share in enumerate(flops))  # type: ignore[arg-type]
    return ModelTable("test", layers, 8, COMPUTE_S, "none")


def predict(table: ModelTable, cluster: ClusterSpec, exchange: Exchange = EXACT) -> Prediction:
    return Planner(table, cluster, exchange).predict()


def test_one_worker_takes_its_compute() -> None:
    step = predict(network(1, 2), ClusterSpec(1, 1e9))
    assert step.step_s == pytest.approx(COMPUTE_S)
    assert step.loads == ()
    assert step.speedup == pytest.approx(1.0)


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_only_layer_is_exposed_in_full(hosts: int, overlap: bool) -> None:
    """4 bytes times 2 (P − 1)/P, and two messages that follow one another."""
    cluster = ClusterSpec(hosts, 1e7)
    step = predict(network(1), cluster, replace(EXACT, overlap=overlap))
    exchange_s = 4e6 * 2 * (hosts - 1) / hosts / cluster.payload_bytes_per_s
    assert step.step_s == pytest.approx(COMPUTE_S + exchange_s, rel=5e-3)
    assert step.exposed_s[0] == pytest.approx(exchange_s, rel=5e-3)


def test_what_is_computed_meanwhile_hides_the_exchange() -> None:
    cluster = ClusterSpec(4, 1e8)  # a layer takes 0.5 s
    assert predict(network(1, 1, 1, 1), cluster).step_s == pytest.approx(COMPUTE_S + 0.55, abs=0.05)
    overlapped = predict(network(100, 1, 1, 1), cluster, replace(EXACT, overlap=True))
    assert overlapped.step_s > COMPUTE_S + 0.4, "the first layer's gradient comes last, and it is needed first"
    assert predict(network(1, 1), ClusterSpec(4, 1e11)).step_s == pytest.approx(COMPUTE_S, rel=1e-3)


@pytest.mark.parametrize("model", ["VGG19", "AlexNet", "GoogLeNet", "GPT-2", "DLRM"])
@pytest.mark.parametrize("rate", [1e9, 1e10])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_step_beats_the_bound(model: str, rate: float, overlap: bool) -> None:
    table = model_table(model)
    cluster = ClusterSpec(8, rate, products_per_s=float("inf"))
    step = predict(table, cluster, replace(EXACT, scheme="ps", overlap=overlap))
    port = [8 * 7 / 8 * layer.parameter_count / cluster.payload_bytes_per_s for layer in table.layers]
    least_s = least_step_seconds(table, table.iteration_seconds, 0.0, port, overlap=overlap)
    assert least_s <= step.step_s * 1.0001
    assert step.step_s <= 1.1 * least_s, "the schedule is close to the best one"


@pytest.mark.parametrize("model", ["VGG19", "ResNet-50", "BERT-base"])
@pytest.mark.parametrize("scheme", ["auto", "ps"])
@pytest.mark.parametrize("hosts", [2, 8, 16])
def test_bytes_are_those_of_the_closed_forms(model: str, scheme: str, hosts: int) -> None:
    table = model_table(model)
    step = predict(table, ClusterSpec(hosts, 1e9), replace(EXACT, scheme=scheme, replayed=True))
    assert step.port_bytes == pytest.approx(bytes_per_worker(table, hosts, scheme), rel=2e-3)


CLUSTERS = {
    "2": ClusterSpec(2, 1e9),
    "8": ClusterSpec(8, 1e9),
    "16 fast": ClusterSpec(16, 1e10),
    "racks": ClusterSpec(8, 1e9, racks=2, oversubscription=4.0),
    "strict": ClusterSpec(8, 1e9, strict_priority=True),
}


@pytest.mark.parametrize("model", ["AlexNet", "ResNet-50"])
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("scheme", ["auto", "ps"])
@pytest.mark.parametrize("overlap", [False, True])
def test_classes_agree_with_messages(model: str, name: str, scheme: str, overlap: bool) -> None:
    planner = Planner(model_table(model), CLUSTERS[name], replace(EXACT, scheme=scheme, overlap=overlap))
    by_class, by_message = planner.predict(), planner.predict_by_message()
    assert by_class.step_s == pytest.approx(by_message.step_s, rel=0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("model", "rate"), [("ResNet-50", 1e9), ("ResNet-50", 1e10), ("VGG19", 1e9), ("VGG19", 1e10)])
def test_a_slow_worker_holds_up_all(model: str, rate: float, overlap: bool) -> None:
    table, exchange = model_table(model), Exchange(overlap=overlap)
    even = Planner(table, ClusterSpec(8, rate), exchange).predict()
    planner = Planner(table, ClusterSpec(8, rate, slowest=1.5), exchange)
    by_class, by_message = planner.predict(), planner.predict_by_message()
    assert by_class.step_s == pytest.approx(by_message.step_s, rel=0.01)
    assert even.step_s < by_class.step_s < 1.51 * even.step_s
    if rate == 1e10:
        assert by_class.step_s == pytest.approx(1.5 * even.step_s, rel=0.02), "compute is the limit"


@pytest.mark.parametrize("model", ["AlexNet", "VGG19"])
@pytest.mark.parametrize("overlap", [False, True])
def test_dedicated_servers_are_near_the_bound(model: str, overlap: bool) -> None:
    """The port of a server carries what two workers send. docs/benchmarks.md has 0.96 to 1.00 of the bound."""
    table, cluster = model_table(model), ClusterSpec(8, 1e9, servers=4)
    planner = Planner(table, cluster, replace(EXACT, scheme="ps", overlap=overlap))
    port = [8 * layer.parameter_count / cluster.payload_bytes_per_s for layer in table.layers]
    least_s = least_step_seconds(table, table.iteration_seconds, 0.0, port, overlap=overlap)
    assert 0.94 < least_s / planner.predict().step_s <= 1.0001
    with pytest.raises(InvalidArgument, match="by classes only"):
        planner.predict_by_message()


def test_sharded_factors_agree_by_message() -> None:
    table = replace(network(1, 1, size=2048, kind="fc"), batch=128)
    for hosts in (4, 8, 16):
        planner = Planner(table, ClusterSpec(hosts, 1e9), replace(EXACT, scheme="sharded_factors"))
        by_class, by_message = planner.predict(), planner.predict_by_message()
        assert {load.scheme for load in by_class.loads} == {"sharded_factors"}
        assert by_class.step_s == pytest.approx(by_message.step_s, rel=0.01)


def test_workers_of_a_host_put_the_model_on_its_port_once() -> None:
    table = scaled(model_table("VGG19"), 4)
    sizes = {"chunk_bytes": 16 << 10, "small_bytes": 2 << 10, "group_bytes": 64 << 10}
    step = predict(table, ClusterSpec(2, 1.5625e8, workers_per_host=4), Exchange(scheme="ps", sizes=sizes))
    assert step.port_bytes / 2**20 == pytest.approx(69.4, rel=0.01), "as docs/benchmarks.md has counted"
    with pytest.raises(InvalidArgument, match="by classes only"):
        Planner(table, ClusterSpec(2, 1e9, workers_per_host=4), EXACT).predict_by_message()


def test_rack_labels_help_where_uplinks_are_the_limit() -> None:
    table = network(1, 1)
    racks = ClusterSpec(8, 1e8, racks=2, oversubscription=4.0)
    with_labels = replace(racks, rack_labels=True)
    alone, together = (predict(table, cluster, replace(EXACT, scheme="ps")) for cluster in (racks, with_labels))
    flat = predict(table, ClusterSpec(8, 1e8), replace(EXACT, scheme="ps"))
    assert alone.step_s - COMPUTE_S > 2 * (together.step_s - COMPUTE_S)
    assert together.step_s >= flat.step_s
    several = replace(with_labels, workers_per_host=2)
    assert predict(table, several, replace(EXACT, scheme="ps")).step_s == pytest.approx(together.step_s, rel=0.1)


def test_products_take_the_accelerators_time() -> None:
    table = replace(network(1, 1, size=4096, kind="fc"), batch=32)
    cluster = ClusterSpec(8, 1e12)
    free = predict(table, replace(cluster, products_per_s=float("inf")), replace(EXACT, scheme="sfb"))
    shared = predict(table, cluster, replace(EXACT, scheme="sfb"))
    own = 7 * 32 * 2 * 4096**2  # multiply-adds for what the seven others send
    rate = table.flops * 32 * 3 / 2 / COMPUTE_S
    assert shared.step_s - free.step_s == pytest.approx(own / rate, rel=0.02)


def test_the_choice_is_by_time() -> None:
    """By bytes the layer goes as factors. Its product would take longer than its dense gradient."""
    table = replace(network(1, 1, size=4096, kind="fc"), batch=32)
    slow = ClusterSpec(8, 1e11, products_per_s=1e10)
    by_bytes, by_time = (predict(table, slow, Exchange(by_time=choice)) for choice in (False, True))
    assert {load.scheme for load in by_bytes.loads} == {"sfb"}
    assert "ps" in {load.scheme for load in by_time.loads}
    assert by_time.step_s < by_bytes.step_s


def test_a_thousand_workers_take_seconds() -> None:
    began = time.monotonic()
    step = predict(model_table("VGG19-22K"), ClusterSpec(1024, 1e10), Exchange())
    assert time.monotonic() - began < 10
    assert 1 < step.speedup <= 1024


def test_order_and_classes_are_those_of_the_options() -> None:
    """In a random order an unfortunate layer holds up forward; with one class switches know no urgency."""
    table, cluster = model_table("AlexNet", "k40"), ClusterSpec(8, 5e9, strict_priority=True)
    urgent = Exchange(scheme="ps", overlap=True, threshold=0.5, by_time=False)
    steps = [predict(table, cluster, exchange) for exchange in (urgent, replace(urgent, order="random", classes=1))]
    assert steps[0].step_s < steps[1].step_s
    assert {load.traffic_class for load in steps[0].loads} == {0, 1}
    assert {load.traffic_class for load in steps[1].loads} == {0}
    levels = [[load.unit.level for load in step.loads if len(load.unit.members) == 1] for step in steps]
    assert levels[0] == sorted(levels[0], reverse=True)
    assert levels[1] != sorted(levels[1], reverse=True)


def test_a_whole_tensor_on_one_server_takes_longer() -> None:
    table, cluster = model_table("AlexNet"), ClusterSpec(8, 1e9)
    coarse = Planner(table, cluster, replace(EXACT, scheme="ps", partition="coarse")).predict_by_message()
    assert coarse.step_s > 2 * Planner(table, cluster, replace(EXACT, scheme="ps")).predict_by_message().step_s


def test_unknown_schemes_and_wires_are_refused() -> None:
    for exchange in (Exchange(scheme="project_adam"), Exchange(scheme="magic"), Exchange(wire="fp8")):
        with pytest.raises(InvalidArgument):
            Planner(network(1), ClusterSpec(2, 1e9), exchange)


def test_the_trace_holds_the_step(tmp_path: Path) -> None:
    step = predict(model_table("AlexNet"), ClusterSpec(8, 1e9))
    write_prediction(step, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last / 1e6 == pytest.approx(step.step_s, rel=1e-3)
    assert {event["cat"] for event in events if event["ph"] == "X"} >= {"forward", "backward", "synchronization"}
