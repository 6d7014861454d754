"""Aggregators that take the place of the mean: push and pull of medians, and what servers refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import poseidon
from poseidon.errors import PoseidonError
from test_exchange_api import joined, part_of, run

STEPS = 4


def medians(port: int) -> None:
    with joined(port) as exchange:
        names = ("float32", "float64", "float16")
        exchange.declare({name: np.zeros((37, 21), name) for name in names} | {"w": np.ones(1001)})
        exchange.set_rule(names, poseidon.UpdateRule("none", aggregator="median"))
        exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=0.5, aggregator="median"))
        parameters = np.ones(1001)
        for step in range(STEPS):
            for name in names:
                parts = [part_of(rank, (37, 21), name, step) for rank in range(exchange.world_size)]
                out = np.zeros((37, 21), name)
                exchange.push_pull(name, parts[exchange.rank], out=out)
                assert np.array_equal(out, np.median(np.stack(parts), axis=0).astype(name)), name
            gradients = [np.random.default_rng((rank, step)).normal(size=1001) for rank in range(exchange.world_size)]
            held = np.zeros(1001)
            exchange.push_pull("w", gradients[exchange.rank], out=held)
            parameters -= 0.5 * np.median(np.stack(gradients), axis=0)
            np.testing.assert_allclose(held, parameters, rtol=1e-12, atol=1e-14)
        exchange.set_rule("float32", poseidon.UpdateRule("none"))
        mean = np.full((37, 21), exchange.rank, "float32")
        exchange.push_pull("float32", mean)
        assert np.allclose(mean, (exchange.world_size - 1) / 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_aggregator_takes_the_place_of_the_mean(world_size: int) -> None:
    run(world_size, medians)


def push_aggregated(exchange: poseidon.Exchange, name: str, average: bool) -> None:
    exchange.declare({"w": np.ones(5000)})
    exchange.set_rule("w", poseidon.UpdateRule("none", aggregator=name))
    exchange.push_pull("w", np.zeros(5000), average=average)


def unusable_aggregator(port: int, name: str, average: bool, options: dict[str, Any], message: str) -> None:
    exchange = joined(port, **options)
    with pytest.raises(PoseidonError, match=message):  # of any call: another rank may be the first to hear it
        push_aggregated(exchange, name, average)


@pytest.mark.parametrize(
    ("name", "average", "options", "message"),
    [
        ("mode", True, {}, "no aggregator 'mode', but sum, median"),
        ("median", False, {}, "takes the place of a mean"),
        ("median", True, {"consistency": "async"}, "use consistency=bsp"),
        ("median", True, {"reduce_order": "arrival"}, "use reduce_order=rank"),
    ],
)
def test_servers_say_why_they_cannot_aggregate(name: str, average: bool, options: dict[str, Any], message: str) -> None:
    run(2, unusable_aggregator, name, average, options, message)
