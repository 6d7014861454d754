"""Closed forms of the bytes a worker moves, and the counters they are compared with."""

from __future__ import annotations

import socket

import pytest

from closed_forms import (
    Format,
    adam_floats,
    bytes_per_worker,
    layer_bytes,
    layer_scheme,
    powersgd_bytes,
    ps_floats,
    sfb_floats,
    sharded_floats,
)
from poseidon import _core
from poseidon.bench.hosts.measures import interface_counters
from poseidon.bench.training.methods import METHODS, parse_methods
from poseidon.bench.training.traffic import dedicated_share, traffic
from poseidon.models import LayerSpec, ModelTable, model_table
from poseidon.planner import Exchange


def table_of(*layers: LayerSpec, batch: int = 32) -> ModelTable:
    return ModelTable("test", layers, batch, 1.0, "none")


SQUARE = LayerSpec("fc", "fc", (4096, 4096), False, 1.0)


def test_golden_values_of_the_paper() -> None:
    assert ps_floats(4096 * 4096, 8) == pytest.approx(58.72e6, rel=1e-3)
    assert sfb_floats(4096, 4096, 32, 8) == pytest.approx(3.67e6, rel=1e-3)


def test_adam_moves_the_same_at_the_owner_as_at_all_others_together() -> None:
    owner = 7 * (4096 * 4096 + 32 * 4096 + 32 * 4096)  # Table 1
    assert adam_floats(4096, 4096, 32, 8) * 8 == pytest.approx(2 * owner)


def test_best_scheme_follows_algorithm_1() -> None:
    thin = LayerSpec("classifier", "fc", (1000, 1024), True, 1.0)
    conv = LayerSpec("conv", "conv", (64, 3, 3, 3), True, 1.0)
    assert layer_scheme(SQUARE, 32, 8, "auto") == "sfb"
    assert layer_scheme(thin, 128, 16, "auto") == "ps"
    assert layer_scheme(conv, 0, 8, "auto") == "ps"
    assert layer_scheme(conv, 0, 8, "project_adam") == "ps"
    assert layer_scheme(SQUARE, 2048, 8, "sfb") == "sfb"
    assert layer_scheme(SQUARE, 2049, 8, "sfb") == "ps", "one worker's factors are larger than its gradient"
    assert layer_scheme(SQUARE, 32, 8, "sfb", Format(small_bytes=4 * 4096**2)) == "ps", "groups have no factors"
    assert layer_scheme(conv, 0, 8, "sfb") == "ps"
    # The tie K·P = 2MN/(M + N) goes to factors.
    assert layer_scheme(SQUARE, 512, 8, "auto") == "sfb"
    assert layer_scheme(SQUARE, 513, 8, "auto") == "ps"


def test_a_scheme_without_a_closed_form_is_refused() -> None:
    conv = LayerSpec("conv", "conv", (64, 3, 3, 3), True, 1.0)
    for layer in (SQUARE, conv):
        with pytest.raises(ValueError, match="no bytes of scheme 'onebit'"):
            layer_scheme(layer, 32, 8, "onebit")


def test_long_layers_with_many_rows_take_sharded_factors() -> None:
    fc6 = LayerSpec("fc6", "fc", (4096, 25088), False, 1.0)
    assert sharded_floats(4096, 25088, 512, 16) == pytest.approx(30 * (512 * (25088 / 16 + 4096) + 4096 * 25088 / 16))
    assert [layer_scheme(fc6, count, 16, "auto") for count in (32, 512, 4096)] == ["sfb", "sharded_factors", "ps"]
    moved = bytes_per_worker(table_of(LayerSpec("fc6", "fc", (4096, 25088), False, 1.0, 16)), 16, "auto")
    assert moved == pytest.approx(4 * sharded_floats(4096, 25088, 512, 16))


@pytest.mark.parametrize("shape", [(4096, 25088), (25088, 4096), (4096, 4096), (1000, 1024), (32000, 1024)])
@pytest.mark.parametrize("worker_count", [2, 8, 16, 64])
def test_auto_is_what_the_core_chooses(shape: tuple[int, int], worker_count: int) -> None:
    layer = _core.Layer("weight", "float32", shape[0] * shape[1], *shape)
    cluster = _core.Cluster(worker_count, worker_count)
    for count in (1, 8, 32, 100, 128, 256, 511, 512, 1000, 5000):
        chosen = layer_scheme(LayerSpec("fc", "fc", shape, False, 1.0), count, worker_count, "auto")
        assert chosen == _core.best_scheme(layer, count, cluster), count


@pytest.mark.parametrize("model", ["VGG19", "GoogLeNet", "BERT-base", "GPT-2"])
@pytest.mark.parametrize("form", [Format(), Format("bf16", 4096), Format("int8", 32 << 10)])
@pytest.mark.parametrize("scheme", ["auto", "ps", "project_adam"])
def test_the_bytes_of_a_plan_are_those_of_the_closed_forms(model: str, form: Format, scheme: str) -> None:
    if scheme == "project_adam" and form.wire != "fp32":
        form = Format(small_bytes=form.small_bytes)  # it sends numbers as they are
    table = model_table(model)
    exchange = Exchange(scheme, form.wire, sizes={"small_bytes": form.small_bytes}, replayed=True)
    for worker_count in (1, 2, 8):
        expected = [layer_bytes(one, table.factor_count(one), worker_count, scheme, form) for one in table.layers]
        planned = [one.bytes for one in traffic(table, worker_count, exchange)]
        assert planned == pytest.approx(expected, rel=2e-3)


def test_dedicated_servers_take_half_of_what_a_worker_moves_off_it() -> None:
    assert dedicated_share(2) == pytest.approx(1)
    assert dedicated_share(8) == pytest.approx(8 / 14)


def test_adam_pushes_factors_only_where_they_are_smaller() -> None:
    assert layer_scheme(SQUARE, 2048, 8, "project_adam") == "project_adam"
    assert layer_scheme(SQUARE, 2049, 8, "project_adam") == "ps"


def test_biases_go_through_the_parameter_server() -> None:
    biased = LayerSpec("fc", "fc", (4096, 4096), True, 1.0)
    difference = bytes_per_worker(table_of(biased), 8, "auto") - bytes_per_worker(table_of(SQUARE), 8, "auto")
    assert difference == pytest.approx(ps_floats(4096, 8) * 4)


def test_one_worker_moves_nothing() -> None:
    assert all(bytes_per_worker(table_of(SQUARE), 1, scheme) == 0 for scheme in ("auto", "ps", "project_adam"))


def test_methods_and_their_closed_forms() -> None:
    table = model_table("VGG19")
    dense = 4 * 143_667_240 * 7 / 8 * 4
    assert METHODS["none"].closed_form_bytes(table, 8) == 0
    assert METHODS["ddp"].closed_form_bytes(table, 8) == pytest.approx(dense)
    assert METHODS["ddp-fp16"].closed_form_bytes(table, 8) == pytest.approx(dense / 2)
    assert METHODS["ddp-bf16"].closed_form_bytes(table, 8) == pytest.approx(dense / 2)
    for name in ("poseidon", "overlap"):
        exact = METHODS[name].closed_form_bytes(table, 8)
        for wire in ("bf16", "fp16"):
            assert METHODS[f"{name}-{wire}"].closed_form_bytes(table, 8) == pytest.approx(exact / 2)
    assert METHODS["wfbp-ps"].closed_form_bytes(table, 8) == pytest.approx(dense)
    assert METHODS["coarse-ps"].closed_form_bytes(table, 8) == pytest.approx(dense)
    assert METHODS["poseidon"].closed_form_bytes(table, 8) < dense / 4


def test_rounded_numbers_take_fewer_bytes() -> None:
    conv = LayerSpec("conv", "conv", (64, 64, 4, 4), False, 1.0)
    dense = ps_floats(1 << 16, 8)
    sizes = {
        wire: bytes_per_worker(table_of(conv), 8, "auto", Format(wire)) for wire in ("fp32", "bf16", "fp16", "int8")
    }
    assert sizes == pytest.approx({"fp32": 4 * dense, "bf16": 2 * dense, "fp16": 2 * dense, "int8": 260 / 256 * dense})


def test_int8_sends_groups_and_factors_as_bf16() -> None:
    factors = sfb_floats(4096, 4096, 32, 8)
    for wire in ("bf16", "int8"):
        assert bytes_per_worker(table_of(SQUARE), 8, "auto", Format(wire)) == pytest.approx(2 * factors)
    norm = LayerSpec("norm", "norm", (256,), True, 1.0)  # two tensors of 1,024 bytes
    alone, grouped = Format("int8", small_bytes=1023), Format("int8", small_bytes=1024)
    assert bytes_per_worker(table_of(norm), 8, "auto", alone) == pytest.approx(260 / 256 * ps_floats(512, 8))
    assert bytes_per_worker(table_of(norm), 8, "auto", grouped) == pytest.approx(2 * ps_floats(512, 8))


def test_a_small_weight_goes_into_a_group_and_not_as_factors() -> None:
    assert layer_scheme(SQUARE, 32, 8, "auto", Format(small_bytes=4 * 4096**2 - 1)) == "sfb"
    assert layer_scheme(SQUARE, 32, 8, "auto", Format(small_bytes=4 * 4096**2)) == "ps"


def test_powersgd_sends_two_factors_where_they_halve_the_bytes() -> None:
    biased = LayerSpec("conv", "conv", (256, 64, 3, 3), True, 1.0)
    assert powersgd_bytes(biased, 8, 4) == pytest.approx(4 * ps_floats(4 * (256 + 576) + 256, 8))
    thin = LayerSpec("fc", "fc", (16, 64), False, 1.0)  # 4 × 80 × 2 = 640 of 1,024 elements; 8 × 80 × 2 is more
    assert powersgd_bytes(thin, 8, 4) == pytest.approx(4 * ps_floats(320, 8))
    assert powersgd_bytes(thin, 8, 8) == pytest.approx(4 * ps_floats(1024, 8))
    assert powersgd_bytes(thin, 8, 4, small_bytes=4096) == pytest.approx(4 * ps_floats(1024, 8))
    assert METHODS["overlap-powersgd"].scaled(2).options["powersgd_rank"] == 2
    assert METHODS["ddp-powersgd"].scaled(4).powersgd_rank == 1
    assert METHODS["ddp-powersgd"].scaled(8).powersgd_rank == 1


def test_lossy_broadcasts_send_a_part_of_every_tensor_to_every_worker() -> None:
    layer = LayerSpec("fc", "fc", (100, 1000), True, 1.0)  # the bias travels whole, in a group
    bias = 4 * ps_floats(100, 8)
    topk = METHODS["poseidon-topk"].layer_bytes(table_of(layer), 8, small_bytes=400)
    assert topk == pytest.approx([2 * 7 * 8 * 1000 + bias])
    onebit = METHODS["poseidon-onebit"].layer_bytes(table_of(layer), 8, small_bytes=400)
    assert onebit == pytest.approx([2 * 7 * 196 * 72 + bias])


def test_a_shared_weight_moves_once() -> None:
    table = model_table("GPT-2")
    assert METHODS["ddp"].closed_form_bytes(table, 8) == pytest.approx(4 * ps_floats(124_439_808, 8))
    assert METHODS["overlap-bf16"].closed_form_bytes(table, 8) == pytest.approx(2 * ps_floats(124_439_808, 8))


def test_parsing_methods() -> None:
    assert [method.name for method in parse_methods("ddp, poseidon,ddp")] == ["none", "ddp", "poseidon"]
    with pytest.raises(ValueError, match="known are none"):
        parse_methods("horovod")


def _connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        return sender, listener.accept()[0]


def test_interface_counters_see_traffic() -> None:
    before = interface_counters("lo")
    sender, receiver = _connected_pair()
    with sender, receiver:
        sender.sendall(bytes(100_000))
        remaining = 100_000
        while remaining:
            remaining -= len(receiver.recv(remaining))
    moved = interface_counters("lo") - before
    assert moved.sent >= 100_000
    assert moved.total >= 200_000
    with pytest.raises(ValueError, match="nowhere0"):
        interface_counters("nowhere0")
