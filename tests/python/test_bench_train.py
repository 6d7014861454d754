"""`poseidon bench train`: two hosts on loopback, short sleeps; what it reports and how it fails."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poseidon.bench.hosts.fleet import LOOPBACK, make_barrier, start_fleet
from poseidon.bench.hosts.measures import step_seconds
from poseidon.bench.training.methods import METHODS, parse_methods, scaled_sizes
from poseidon.bench.training.plot import efficiency_plot
from poseidon.bench.training.replay import ReplayModel
from poseidon.bench.training.results import MethodResult, TrainConfig, TrainResult
from poseidon.bench.training.run import run_training
from poseidon.cli.main import app
from poseidon.errors import PeerLost, PoseidonError, PoseidonTimeout
from poseidon.launch import free_port
from poseidon.options import resolve
from poseidon.testbed import missing_requirements
from waiting import stay


class Answering:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, value: int) -> int:
        return 2 * value + self.rank

    def fail_at(self, rank: int) -> None:
        if rank == self.rank:
            raise ValueError("on purpose")

    def die_at(self, rank: int) -> None:
        if rank == self.rank:
            os._exit(3)

    def be_silent_at(self, rank: int) -> None:
        if rank == self.rank:
            stay()


def test_fleet_answers_in_rank_order() -> None:
    with start_fleet([LOOPBACK] * 3, Answering) as fleet:
        assert fleet.call_same("double", 10, timeout_seconds=20) == [20, 21, 22]
        assert fleet.call("double", [(1,), (2,), (3,)], 20) == [2, 5, 8]


def test_fleet_names_the_host_that_fails() -> None:
    failure = pytest.raises(PoseidonError, match=r"host 1 failed during fail_at[\s\S]*on purpose")
    with start_fleet([LOOPBACK] * 3, Answering) as fleet, failure:
        fleet.call_same("fail_at", 1, timeout_seconds=20)


def test_fleet_names_the_host_that_dies() -> None:
    failure = pytest.raises(PeerLost, match="host 2 died during die_at")
    with start_fleet([LOOPBACK] * 3, Answering) as fleet, failure:
        fleet.call_same("die_at", 2, timeout_seconds=20)


def test_fleet_names_the_hosts_that_are_silent() -> None:
    failure = pytest.raises(PoseidonTimeout, match=r"hosts \[1\] gave no answer")
    with start_fleet([LOOPBACK] * 2, Answering) as fleet, failure:
        fleet.call_same("be_silent_at", 1, timeout_seconds=0.5)


def test_a_step_ends_with_the_slowest_host() -> None:
    assert step_seconds([[0.0, 1.0, 3.0], [0.5, 1.2, 2.0]]) == pytest.approx([0.7, 1.8])


# Overlapped methods search theirs in hundreds of steps, which is tested apart, with DLRM and with dedicated servers.
SET_THRESHOLD = {"priority_threshold": "0.5"}


def config(methods: str, **changes: Any) -> TrainConfig:
    base = TrainConfig("CIFAR-10 quick", 2, None, 2, 0.1, tuple(parse_methods(methods)), 3, 2, timeout_seconds=30)
    return replace(base, **changes)


def test_batch_sets_the_factor_count_and_its_time() -> None:
    """A row of factors is charged alike, whatever the batch: as the forward pass makes it."""
    whole, table = (config("ddp", model="AlexNet", scale=4, batch=batch).table for batch in (None, 32))
    assert table.iteration_seconds == whole.iteration_seconds / 8
    layers = [ReplayModel(one, one.iteration_seconds).linear_weights().values() for one in (whole, table)]
    rates = [[layer.row_seconds for layer in found] for found in layers]
    assert len(rates[0]) == 3
    assert rates[0] == pytest.approx(rates[1])
    assert {table.factor_count(layer) for layer in table.layers if layer.factorable} == {8}
    assert config("ddp", model="AlexNet", scale=4).table.batch == 64


def test_sizes_shrink_with_the_weights() -> None:
    defaults = resolve()
    assert scaled_sizes(1) == {name: getattr(defaults, name) for name in scaled_sizes(1)}
    assert scaled_sizes(4)["chunk_bytes"] == defaults.chunk_bytes // 16
    # The least that Poseidon takes.
    resolve(**scaled_sizes(1 << 20))


def test_ddp_alternates_with_no_exchange() -> None:
    calls: list[str] = []
    result = run_training(config("ddp"), lambda method, *_: calls.append(method))
    assert calls == ["none", "ddp", "none", "ddp"]
    none, ddp = result.methods
    assert (none.method, none.efficiency, none.closed_form_bytes) == ("none", 1.0, 0.0)
    assert len(ddp.step_seconds) == 6
    assert min(none.step_seconds) >= 0.09
    assert ddp.speedup == pytest.approx(2 * ddp.efficiency)
    assert ddp.payload_bytes is None
    # Headers of short messages weigh much on so small a model; all of it has to be there all the same.
    assert ddp.interface_bytes >= 0.95 * ddp.closed_form_bytes
    assert result.tcp_copy_bits_per_second is None
    assert ddp.bound_seconds is None


@pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")
def test_a_slow_link_shows() -> None:
    result = run_training(config("ddp", model="AlexNet", scale=16, link="20mbit", step_count=1, repeat_count=1))
    _, ddp = result.methods
    seconds = ddp.closed_form_bytes / 2 * 8 / 20e6  # at the rate of one direction
    assert ddp.iteration_seconds > max(0.1, 0.8 * seconds)
    assert ddp.efficiency < 0.9
    assert result.tcp_copy_bits_per_second is not None
    assert 5e6 < result.tcp_copy_bits_per_second < 21e6
    assert ddp.deviation == pytest.approx(0, abs=0.1)
    # Wait-free backpropagation begins after the forward pass.
    assert ddp.bound_seconds is not None
    wire_seconds = ddp.closed_form_bytes / 2 * 8 / result.tcp_copy_bits_per_second
    assert 0.1 / 3 + wire_seconds < ddp.bound_seconds < 0.1 + wire_seconds + result.by_name("none").iteration_seconds
    assert result.bound(ddp) == pytest.approx(result.by_name("none").iteration_seconds / ddp.bound_seconds)
    assert 0.5 < result.of_bound(ddp) < 1.1


def test_poseidon_methods_move_what_the_closed_form_says() -> None:
    pytest.importorskip("poseidon._core")
    names = "poseidon,wfbp-ps,ps-sequential,coarse-ps,project_adam"
    # At larger scales headers, which do not shrink, would weigh on the small chunks.
    result = run_training(config(names, model="AlexNet", scale=4, repeat_count=1))
    for entry in result.methods[1:]:
        assert entry.deviation is not None, entry.method
        assert abs(entry.deviation) < 0.01, entry
    by_name = {entry.method: entry for entry in result.methods}
    assert by_name["poseidon"].payload_bytes < by_name["wfbp-ps"].payload_bytes


def test_overlapped_methods_move_what_the_closed_form_says() -> None:
    pytest.importorskip("poseidon._core")
    names = "overlap,overlap-ps,vanilla,partition,slicing,end-host,geryon,geryon-coarse"
    changes = {"model": "AlexNet", "scale": 4, "step_count": 2, "repeat_count": 1, "options": SET_THRESHOLD}
    result = run_training(config(names, **changes))
    for entry in result.methods[1:]:
        assert entry.deviation is not None, entry.method
        assert abs(entry.deviation) < 0.01, entry
        assert len(entry.step_seconds) == 2


@pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")
def test_coding_and_servers_that_return_parameters_move_fewer_bytes() -> None:
    names = "poseidon,poseidon-plain,server,server-bf16"
    changes: dict[str, Any] = {"model": "ViT-B/16", "scale": 16, "link": "40mbit", "step_count": 1, "repeat_count": 1}
    result = run_training(config(names, **changes))
    _, coded, plain, server, narrow = result.methods
    assert plain.coded_share == pytest.approx(1)
    assert coded.coded_share is not None
    assert 0.8 < coded.coded_share < 0.92, "27.4 bits of 32, and headers"
    assert coded.interface_bytes < 0.95 * plain.interface_bytes
    assert coded.bound_seconds is not None
    assert plain.bound_seconds is not None
    assert coded.bound_seconds < plain.bound_seconds
    assert narrow.closed_form_bytes == pytest.approx(server.closed_form_bytes / 2)
    for entry in (server, narrow):
        assert entry.deviation == pytest.approx(0, abs=0.15), "no gradient comes back, and headers do not shrink"
    assert narrow.interface_bytes < 0.55 * server.interface_bytes


def test_dedicated_servers_move_what_the_closed_form_says() -> None:
    pytest.importorskip("poseidon._core")
    changes: dict[str, Any] = {"model": "AlexNet", "host_count": 3, "server_count": 2, "scale": 4, "step_count": 2}
    result = run_training(config("wfbp-ps,overlap-ps,ddp", repeat_count=1, **changes))
    assert result.servers == 2
    for entry in result.methods[1:3]:
        assert entry.deviation is not None, entry.method
        assert abs(entry.deviation) < 0.01, entry
    # The whole gradient once in each direction; an all-reduce of three moves 4/3 of it.
    dedicated, ring = (result.by_name(name).closed_form_bytes for name in ("wfbp-ps", "ddp"))
    assert dedicated == pytest.approx(0.75 * ring)


def test_with_dedicated_servers_methods_with_other_bytes_are_refused() -> None:
    with pytest.raises(PoseidonError, match=r"servers is 2: .* such as wfbp-ps and overlap-ps; poseidon may not"):
        run_training(config("poseidon,wfbp-ps", model="AlexNet", server_count=2))


def test_rounded_methods_move_what_the_closed_form_says() -> None:
    pytest.importorskip("poseidon._core")
    names = "poseidon-bf16,poseidon-fp16,poseidon-int8,overlap-bf16,overlap-fp16,overlap-int8"
    changes = {"model": "AlexNet", "scale": 4, "step_count": 2, "repeat_count": 1, "options": SET_THRESHOLD}
    result = run_training(config(names, **changes))
    by_name = {entry.method: entry for entry in result.methods[1:]}
    for entry in by_name.values():
        assert entry.deviation is not None, entry.method
        assert abs(entry.deviation) < 0.01, entry
    assert by_name["overlap-int8"].payload_bytes < 0.9 * by_name["overlap-bf16"].payload_bytes


def test_lossy_schemes_move_what_the_closed_form_says() -> None:
    pytest.importorskip("poseidon._core")
    names = "poseidon-powersgd,poseidon-topk,poseidon-onebit,overlap-powersgd"
    changes = {"model": "AlexNet", "scale": 4, "step_count": 2, "repeat_count": 1, "options": SET_THRESHOLD}
    result = run_training(config(names, **changes))
    powersgd, topk, onebit, overlapped = result.methods[1:]
    for entry in (topk, onebit):
        assert entry.deviation == pytest.approx(0, abs=0.01), entry
    for entry in (powersgd, overlapped):  # so few bytes that headers weigh much
        assert entry.deviation is not None, entry
        assert 0 <= entry.deviation < 0.1, entry
    assert powersgd.closed_form_bytes < 0.2 * topk.closed_form_bytes < 0.2 * onebit.closed_form_bytes


def test_local_sgd_moves_what_the_closed_form_says() -> None:
    """One exchange in 16 steps, however many steps are asked for; parameters come back in float32."""
    pytest.importorskip("poseidon._core")
    names = "wfbp-ps,local-sgd,local-sgd-bf16,local-sgd-streaming"
    result = run_training(config(names, model="AlexNet", scale=4, repeat_count=1))
    _, every_step, local, bf16, streaming = result.methods
    assert len(local.step_seconds) % 16 == 0
    assert local.iteration_seconds == pytest.approx(sum(local.step_seconds) / len(local.step_seconds))
    assert local.closed_form_bytes == pytest.approx(every_step.closed_form_bytes / 16)
    assert bf16.closed_form_bytes == pytest.approx(0.75 * local.closed_form_bytes)
    assert streaming.closed_form_bytes == local.closed_form_bytes
    for entry in (local, bf16, streaming):
        assert entry.deviation == pytest.approx(0, abs=0.01), entry


@pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")
def test_lossy_hooks_of_ddp_move_what_the_closed_form_says() -> None:
    """On ports of their own: those of loopback count the bytes of every process of this machine."""
    names = "ddp,ddp-bf16,ddp-fp16,ddp-powersgd"
    result = run_training(config(names, model="AlexNet", scale=8, link="200mbit", repeat_count=2))
    _, dense, bf16, fp16, powersgd = result.methods
    for entry in (dense, bf16, fp16):
        assert entry.deviation == pytest.approx(0, abs=0.05), entry  # headers of TCP/IP and of Gloo
    assert bf16.interface_bytes == pytest.approx(fp16.interface_bytes, rel=0.02)
    # Headers and acknowledgements weigh much on so few bytes.
    assert powersgd.closed_form_bytes < powersgd.interface_bytes < 0.02 * dense.interface_bytes


@pytest.mark.parametrize("name", ["GPT-2", "DLRM", "Llama-1B LoRA"])
def test_every_kind_of_layer_is_exchanged(name: str) -> None:
    pytest.importorskip("poseidon._core")
    changes = {"model": name, "scale": 8, "step_count": 1, "repeat_count": 1}
    if name != "DLRM":
        changes["options"] = SET_THRESHOLD
    result = run_training(config("overlap-bf16,poseidon", **changes))
    for entry in result.methods[1:]:
        assert entry.deviation == pytest.approx(0, abs=0.06), entry  # headers of small chunks


def test_a_search_for_a_threshold_is_not_measured() -> None:
    pytest.importorskip("poseidon._core")
    from poseidon.bench.training.host import HostSetup, TrainingHost

    table = config("none").table
    options = {**scaled_sizes(2), "transport": "tcp", "priority_threshold": "auto"}
    setup = HostSetup(table, 0.01, bucket_bytes=1 << 20, timeout_seconds=30, options=options)
    places, port, lockstep = [LOOPBACK] * 2, free_port(), make_barrier(2)
    overlap = METHODS["overlap"]
    with start_fleet(places, lambda rank: TrainingHost(setup, places, rank, port, lockstep)) as fleet:
        first = fleet.call_same("run_round", overlap, 2, 3, free_port(), timeout_seconds=60)
        second = fleet.call_same("run_round", overlap, 2, 3, free_port(), timeout_seconds=60)
        fleet.call_same("close", timeout_seconds=30)
    assert [len(host.ends) for host in (*first, *second)] == [4] * 4
    assert first[0].counted_steps == first[1].counted_steps > 5
    assert [host.counted_steps for host in second] == [5, 5]


def test_command_prints_json_and_a_table(tmp_path: Path) -> None:
    arguments = ["bench", "train", "--model", "CIFAR-10 quick", "--hosts", "2", "--compute", "0.05", "--methods", "ddp"]
    arguments += ["--steps", "1", "--repeats", "1"]
    answer = CliRunner().invoke(app, [*arguments, "--json", "--plot", str(tmp_path / "plot.svg")])
    assert answer.exit_code == 0, answer.output
    (document,) = json.loads(answer.stdout)
    assert document["model"] == "CIFAR-10 quick"
    assert [entry["method"] for entry in document["methods"]] == ["none", "ddp"]
    assert (tmp_path / "plot.svg").exists()
    table = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert table.exit_code == 0
    assert "efficiency" in table.stdout
    assert "ddp" in table.stdout


@pytest.mark.parametrize("wrong", [["--model", "VGG20"], ["--model", "VGG19", "--methods", "horovod"]])
def test_command_refuses_unknown_names(wrong: list[str]) -> None:
    answer = CliRunner().invoke(app, ["bench", "train", *wrong])
    assert answer.exit_code != 0
    assert "known are" in str(answer.exception)


def test_plot_has_a_point_for_each_rate_and_method() -> None:
    def entry(method: str, efficiency: float) -> MethodResult:
        return MethodResult(method, [1.0], 1.0, efficiency, 8 * efficiency, 1.0, 1.0, None, 1.0, 1.0)

    results = [
        TrainResult(
            "VGG19", 8, link, 4, 3.6, 1, 8, 1e8, [entry("none", 1.0), entry("poseidon", 0.9), entry("ddp", 0.5)]
        )
        for link in ("31.25mbit", "156.25mbit")
    ]
    root = ElementTree.fromstring(efficiency_plot(results))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 4
    titles = [title.text for title in root.findall(".//{http://www.w3.org/2000/svg}title")]
    assert "poseidon 31.25 Mb/s: 0.900" in titles
