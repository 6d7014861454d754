"""The bound of a training step against the formulas for simple networks, and against every schedule of tiny ones."""

from __future__ import annotations

import random
from functools import cache

import pytest

from poseidon.bench.training.bound import Carried, least_seconds, least_step_seconds
from poseidon.bench.training.methods import METHODS
from poseidon.models import LayerSpec, ModelTable, model_table, scaled

COMPUTE = 3.0  # forward 1, backward 2


def network(*flops: float) -> ModelTable:
    layers = tuple(LayerSpec(f"layer{index}", "conv", (10, 10), False, share) for index, share in enumerate(flops))
    return ModelTable("test", layers, 1, COMPUTE, "none")


def bound(carry: list[float], *, overlap: bool, flops: list[float] | None = None, updates: float = 0.0) -> float:
    table = network(*(flops or [1.0] * len(carry)))
    return least_step_seconds(table, COMPUTE, updates, carry, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_layer_hides_nothing(overlap: bool) -> None:
    assert bound([5.0], overlap=overlap) == pytest.approx(COMPUTE + 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_to_carry_takes_the_compute_and_the_updates(overlap: bool) -> None:
    assert bound([0.0, 0.0, 0.0], overlap=overlap, updates=0.5) == pytest.approx(3.5)


@pytest.mark.parametrize("carry", [4.0, 10.0, 100.0])
def test_many_equal_layers_on_a_slow_network_gain_the_forward_pass(carry: float) -> None:
    """Without overlap a step is C/3 + T, with overlap T: nothing else can begin before the first gradient exists."""
    layers = 1000
    without = bound([carry / layers] * layers, overlap=False)
    overlapped = bound([carry / layers] * layers, overlap=True)
    assert without == pytest.approx(COMPUTE / 3 + carry, rel=2e-3)
    assert overlapped == pytest.approx(carry, rel=2e-3)
    assert without / overlapped == pytest.approx((COMPUTE / 3 + carry) / carry, rel=3e-3)


@pytest.mark.parametrize(("carry", "step"), [(1.0, 3.0), (1.9, 3.0), (2.5, 3.5)])
def test_many_equal_layers_on_a_fast_network_hide_behind_backward(carry: float, step: float) -> None:
    layers = 1000
    assert bound([carry / layers] * layers, overlap=False) == pytest.approx(step, rel=2e-3)
    assert bound([carry / layers] * layers, overlap=True) == pytest.approx(COMPUTE, rel=2e-3)


def test_the_first_layer_is_exposed_with_overlap_too() -> None:
    """Its gradient comes last and is needed first, as that of an embedding which is also the head."""
    assert bound([0.7, 0.0, 0.0, 0.0], overlap=True) == pytest.approx(COMPUTE + 0.7)
    assert bound([0.0, 0.0, 0.0, 0.7], overlap=True) == pytest.approx(COMPUTE)
    # The last layer has the other layers' backward and forward to hide in: three quarters of both.
    assert bound([0.0, 0.0, 0.0, 3.0], overlap=True) == pytest.approx(COMPUTE / 4 + 3)


def test_updates_follow_the_exchange() -> None:
    assert bound([1.0, 0.0], overlap=True, updates=0.4) == pytest.approx(COMPUTE + 1 + 0.4)
    # Without overlap all updates come after the last exchange; with overlap only its own and those behind it.
    assert bound([0.0, 2.5], overlap=False, updates=0.4) == pytest.approx(1 + 2.5 + 0.4 + 1)
    assert bound([0.0, 2.5], overlap=True, updates=0.4) == pytest.approx(1 + 2.5 + 0.2 + 0.5)


def test_a_tied_head_moves_the_exchange_to_where_it_hides_least() -> None:
    table = model_table("GPT-2")
    owner = [0.0] * len(table.layers)
    owner[0] = 0.2
    assert least_step_seconds(table, 3.0, 0.0, owner, overlap=True) == pytest.approx(3.2)


@pytest.mark.parametrize("overlap", [False, True])
def test_products_follow_their_exchange(overlap: bool) -> None:
    table, carry = network(1.0, 1.0), [0.0, 3.0]  # the last layer's gradient is there after 1 of backward's 2 seconds
    least_s = least_step_seconds(table, COMPUTE, 0.0, carry, [0.0, 0.4], overlap=overlap)
    assert least_s == pytest.approx(least_step_seconds(table, COMPUTE, 0.0, carry, overlap=overlap) + 0.4)
    assert least_step_seconds(table, COMPUTE, 0.0, [0.0, 0.1], [0.0, 0.4], overlap=overlap) == pytest.approx(3.4)


def test_workers_multiply_the_rows_of_the_others() -> None:
    table = scaled(model_table("VGG19"), 4)
    rows = METHODS["poseidon"].product_rows(table, 8)
    multiplied = {layer.name: count for layer, count in zip(table.layers, rows, strict=True) if count}
    assert multiplied == dict.fromkeys(("fc6", "fc7", "fc8"), 7 * table.batch)
    assert not any(METHODS["wfbp-ps"].product_rows(table, 8))
    assert not any(METHODS["ddp"].product_rows(table, 8))


def test_order_counts() -> None:
    heavy_last, heavy_first = [0.1, 2.0], [2.0, 0.1]
    assert bound(heavy_last, overlap=True) < bound(heavy_first, overlap=True)
    # A first layer that computes long gives the last layer's exchange time to hide.
    assert bound(heavy_last, overlap=True, flops=[9.0, 1.0]) < bound(heavy_last, overlap=True, flops=[1.0, 9.0])


def quickest(ready: list[int], pushes: list[int], rest: list[int]) -> int:
    """The best of all schedules in whole slots, by trying each.

    In a slot a port carries one unit: a push of a layer whose gradient exists, or a pull of what was pushed before.
    """
    count = len(ready)

    @cache
    def best(now: int, pushed: tuple[int, ...], pulled: tuple[int, ...]) -> int:
        if list(pulled) == pushes:
            return 0
        ends = [best(now + 1, pushed, pulled)] if now < max(ready) else []
        for layer in range(count):
            if now >= ready[layer] and pushed[layer] < pushes[layer]:
                ends.append(best(now + 1, raised(pushed, layer), pulled))
            if pulled[layer] < pushed[layer]:
                after = raised(pulled, layer)
                end = now + 1 + rest[layer] if after[layer] == pushes[layer] else 0
                ends.append(max(end, best(now + 1, pushed, after)))
        return min(ends)

    return best(0, (0,) * count, (0,) * count)


def raised(counts: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*counts[:index], counts[index] + 1, *counts[index + 1 :])


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_beats_the_bound_and_the_best_one_reaches_it(seed: int) -> None:
    choose = random.Random(seed)
    count = choose.randint(1, 3)
    ready, rest = [[choose.randint(0, 6) for _ in range(count)] for _ in range(2)]
    pushes = [choose.randint(1, 2) for _ in range(count)]
    items = [Carried(a, 2 * b, c) for a, b, c in zip(ready, pushes, rest, strict=True)]
    assert least_seconds(items) == quickest(ready, pushes, rest)


def stepped(carry: list[float], flops: list[float], slot: float) -> float:
    """A step with overlap, run in short slots: the most urgent layer whose gradient exists goes first."""
    durations = network(*flops).durations(COMPUTE)
    ready = [sum(backward for _, backward in durations[layer:]) for layer in range(len(carry))]
    left, done, now = list(carry), [0.0] * len(carry), 0.0
    while max(left) > 1e-9:
        layer = next((layer for layer in range(len(carry)) if left[layer] > 1e-9 and ready[layer] <= now + 1e-9), None)
        now += slot
        if layer is not None:
            left[layer] -= slot
            done[layer] = now
    end = ready[0]
    for layer, (forward, _) in enumerate(durations):
        end = max(end, done[layer]) + forward
    return end


@pytest.mark.parametrize("seed", range(20))
def test_carrying_the_most_urgent_layer_first_reaches_the_bound(seed: int) -> None:
    choose = random.Random(seed)
    count, slot = choose.randint(1, 6), 0.001
    carry = [choose.randint(0, 1500) * slot for _ in range(count)]
    flops = [choose.uniform(0.1, 1) for _ in range(count)]
    least = bound(carry, overlap=True, flops=flops)
    assert least - 1e-6 <= stepped(carry, flops, slot) <= least + 2 * slot * (count + 1)
    assert least <= bound(carry, overlap=False, flops=flops) + 1e-9
