"""Replayed networks: real parameters and gradients, compute time as told, never compressed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from poseidon.bench.training.products import Product
from poseidon.bench.training.replay import ReplayLinear, ReplayModel, ReplaySGD, Timeline, input_token
from poseidon.models import LayerSpec, ModelTable, model_table, scaled
from waiting import compute_for

TABLE = ModelTable(
    "tiny",
    (
        LayerSpec("conv", "conv", (4, 3, 3, 3), True, flops=300.0),
        LayerSpec("conv.norm", "norm", (4,), True, flops=60.0),
        LayerSpec("fc", "fc", (5, 6), True, flops=240.0),
    ),
    batch=2,
    iteration_seconds=0.1,
    iteration_source="none",
)


TIED = ModelTable(
    "tied",
    (
        LayerSpec("wte", "embedding", (6, 4), False, flops=100.0),
        LayerSpec("block.fc", "fc", (4, 4), True, flops=100.0, positions=8),
        LayerSpec("lm_head", "fc", (6, 4), False, flops=100.0, positions=8, shares="wte"),
    ),
    batch=2,
    iteration_seconds=0.1,
    iteration_source="none",
)


@pytest.mark.parametrize("name", ["ResNet-50", "GPT-2", "BERT-base", "ViT-B/16", "Llama-1B LoRA"])
def test_parameters_are_those_of_the_table(name: str) -> None:
    table = scaled(model_table(name), 8)
    model = ReplayModel(table, 0.01)
    assert sum(parameter.numel() for parameter in model.parameters()) == table.parameter_count
    assert not list(model.buffers())


def test_every_parameter_gets_a_real_gradient() -> None:
    model = ReplayModel(TABLE, 0.006)
    model(input_token()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.is_contiguous(), name
        assert float(parameter.grad.abs().sum()) > 0, name
    layer = model.layers["fc"]
    assert isinstance(layer, ReplayLinear)
    assert type(layer.linear) is nn.Linear
    assert model.linear_weights() == {"layers.fc.linear.weight": layer}
    torch.testing.assert_close(layer.linear.weight.grad, layer.output_gradient.T @ layer.input_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_bf16_model_are_the_rounded_ones_in_memory_of_their_own(dtype: torch.dtype) -> None:
    table = scaled(model_table("ViT-B/16"), 16)
    model, plain = ReplayModel(table, 0.006, dtype=dtype), ReplayModel(table, 0.006)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model(input_token()).backward()
    plain(input_token()).backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other.to(dtype)), name
        assert mine.grad is not None, name
        assert mine.grad.untyped_storage().resizable(), "servers would send gradients back that others may look at"
        if "linear" not in name:  # whose product is rounded at other places
            assert torch.equal(mine.grad, other.grad.to(dtype)), name


def test_a_model_beside_another_draws_from_its_stock_as_a_backward_pass_does() -> None:
    first, again = ReplayModel(TIED, 0.006), ReplayModel(TIED, 0.006)
    beside = ReplayModel(TIED, 0.006, beside=first)
    assert beside.gradients is first.gradients
    again(input_token()).backward()
    drawn = beside.drawn()
    for mine, other in zip(beside.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(drawn[mine], other.grad)
    assert all(one.untyped_storage().nbytes() > 4 for one in first.parameters()), "that one keeps its memory"


def test_a_shared_weight_is_one_parameter_whose_gradient_comes_with_its_first_layer() -> None:
    model = ReplayModel(TIED, 0.006)
    names = [name for name, _ in model.named_parameters()]
    assert names == ["layers.wte.weight", "layers.block_fc.weight", "layers.block_fc.bias"]
    assert model.layers["lm_head"].weight is model.layers["wte"].weight
    arrivals: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrivals.append(name))
    model(input_token()).backward()
    assert sorted(arrivals[:2]) == names[1:][::-1]
    assert arrivals[2:] == names[:1]
    # Both uses contribute.
    repeated = ReplayModel(TIED, 0.006).gradients
    wte, block, head = TIED.layers
    parts = [draw(layer) for draw, layer in ((repeated.weight, head), (repeated.weight, block), (repeated.bias, block))]
    total = torch.from_numpy(parts[0] + repeated.weight(wte))  # in the order of the backward pass
    torch.testing.assert_close(model.layers["wte"].weight.grad, total)


def test_layers_whose_factors_do_not_pay_form_no_products() -> None:
    model = ReplayModel(TIED, 0.006)
    assert not model.linear_weights()
    assert not any(isinstance(layer, ReplayLinear) for layer in model.layers.values())


def test_ranks_share_parameters_and_differ_in_rows() -> None:
    first, second = ReplayModel(TABLE, 0.006, rank=0), ReplayModel(TABLE, 0.006, rank=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.layers["fc"].input_rows, second.layers["fc"].input_rows)


def test_a_model_that_takes_the_memory_of_another_has_it_alone() -> None:
    first = ReplayModel(TIED, 0.006)
    places = [parameter.data_ptr() for parameter in first.parameters()]
    values = [parameter.detach().clone() for parameter in first.parameters()]
    second = ReplayModel(TIED, 0.006, memory=first)
    assert second.layers["lm_head"].weight is second.layers["wte"].weight
    for place, value, mine, other in zip(places, values, second.parameters(), first.parameters(), strict=True):
        assert mine.data_ptr() == place
        assert torch.equal(mine, value)
        assert other.shape == mine.shape
        assert other.untyped_storage().nbytes() == 4
    first.take_memory(second)
    assert [parameter.data_ptr() for parameter in first.parameters()] == places


def test_gradients_are_drawn_anew_for_each_layer_rank_and_step() -> None:
    seen = []
    for rank in range(2):
        model = ReplayModel(scaled(model_table("AlexNet"), 8), 0.006, rank=rank)
        for _ in range(2):
            model.zero_grad()
            model(input_token()).backward()
            seen += [layer.weight.grad.flatten()[:64] for name, layer in model.layers.items() if "conv" in name]
    assert len(seen) > 8
    assert len({tuple(values.tolist()) for values in seen}) == len(seen)
    values = torch.cat(seen)
    assert float(values.mean().abs()) < 0.1 * float(values.std())
    assert 0 < float(values.std()) < 1


def test_drawing_is_hidden_behind_the_layers_sleep() -> None:
    """A parameter of 40 MB, which takes some 10 ms to copy, in a layer that takes 200 ms."""
    table = ModelTable("large", (LayerSpec("conv", "conv", (1000, 1000, 10, 1), False, flops=1.0),), 1, 0.3, "none")
    model = ReplayModel(table, 0.3)
    loss = model(input_token())
    start = time.monotonic()
    loss.backward()
    assert 0.2 <= time.monotonic() - start < 0.25


def test_products_that_have_arrived_delay_the_next_layer_and_late_ones_the_end() -> None:
    timeline = Timeline()
    timeline.begin()
    timeline.products = iter([[Product(0.0, 0.05)], [], [Product(time.monotonic() + 0.1, 0.05)]]).__next__
    start = time.monotonic()
    timeline.run(0.01)
    timeline.run(0.01)
    assert time.monotonic() - start == pytest.approx(0.07, abs=0.02)
    timeline.multiply()
    assert time.monotonic() - start == pytest.approx(0.15, abs=0.02)


def test_a_step_takes_the_compute_time() -> None:
    model = ReplayModel(TABLE, 0.3)
    start = time.monotonic()
    loss = model(input_token())
    forward = time.monotonic() - start
    loss.backward()
    elapsed = time.monotonic() - start
    assert 0.1 <= forward < 0.2
    assert 0.3 <= elapsed < 0.6


def test_gradients_arrive_last_layer_first_after_its_share() -> None:
    model = ReplayModel(TABLE, 0.3)
    arrivals: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: arrivals.append((name, time.monotonic() - start))
        )
    loss = model(input_token())
    start = time.monotonic()
    loss.backward()
    assert [name.split(".")[1] for name, _ in arrivals] == ["fc", "fc", "conv_norm", "conv_norm", "conv", "conv"]
    shares = [seconds for _, seconds in arrivals[::2]]
    for seconds, expected in zip(shares, (0.08, 0.10, 0.20), strict=True):
        assert expected <= seconds < expected + 0.1


def test_processor_work_in_backward_does_not_delay_the_accelerator() -> None:
    model = ReplayModel(TABLE, 0.9)
    model.layers["fc"].linear.weight.register_post_accumulate_grad_hook(lambda _: compute_for(0.2))
    loss = model(input_token())
    start = time.monotonic()
    loss.backward()
    assert 0.6 <= time.monotonic() - start < 0.75


def test_a_blocked_forward_is_not_caught_up() -> None:
    model = ReplayModel(TABLE, 0.3)
    model.layers["conv_norm"].register_forward_pre_hook(lambda *_: compute_for(0.05))
    model.layers["fc"].linear.register_forward_pre_hook(lambda *_: compute_for(0.05))
    start = time.monotonic()
    model(input_token())
    assert time.monotonic() - start >= 0.2


def test_a_late_layer_keeps_its_duration() -> None:
    timeline = Timeline()
    timeline.begin()
    timeline.arrive()
    compute_for(0.05)
    start = time.monotonic()
    timeline.run_after_arrival(0.05)
    assert time.monotonic() - start == pytest.approx(0.05, abs=0.04)


def test_what_is_charged_delays_the_next_layer_once() -> None:
    timeline = Timeline()
    timeline.begin()
    timeline.charge(0.1)
    start = time.monotonic()
    timeline.run(0.01)
    timeline.run(0.01)
    assert 0.12 <= time.monotonic() - start < 0.2


def test_what_is_charged_between_passes_has_delayed_them_already() -> None:
    timeline = Timeline()
    timeline.charge(1.0)
    timeline.begin()
    start = time.monotonic()
    timeline.run(0.01)
    assert time.monotonic() - start < 0.5


def test_the_replayed_optimizer_is_sgd() -> None:
    gradients = torch.rand(3, 50)
    values = []
    for build in (torch.optim.SGD, lambda params, **options: ReplaySGD(params, Timeline(), **options)):
        parameter = nn.Parameter(torch.ones(50))
        optimizer = build([parameter], lr=0.1, momentum=0.9, fused=True)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        values.append(parameter.detach())
    assert torch.equal(*values)


def test_an_update_in_a_forward_hook_takes_the_accelerators_time() -> None:
    """Less than a layer takes, which any other work of the processor would hide in."""
    model = ReplayModel(TABLE, 0.9)
    parameter = nn.Parameter(torch.zeros(1 << 20))
    parameter.grad = torch.ones_like(parameter)
    optimizer = ReplaySGD([parameter], model.timeline, lr=0.1, momentum=0.9)
    spent: list[float] = []

    def update(*_: object) -> None:
        before = time.thread_time()
        while time.thread_time() - before < 0.05:
            optimizer.step()
        spent.append(time.thread_time() - before)

    model.layers["conv_norm"].register_forward_pre_hook(update)
    start = time.monotonic()
    model(input_token())
    elapsed = time.monotonic() - start
    assert spent[0] >= 0.05
    assert elapsed >= 0.3 + 0.9 * spent[0]
