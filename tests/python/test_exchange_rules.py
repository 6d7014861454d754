"""Rules of arrays that servers update: values that are not given, and what comes back in fewer bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import poseidon
import workers
from poseidon.launch import free_port


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_a_value_that_is_not_given_is_the_default_of_torch(kind: str) -> None:
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    begin, gradients = np.array([1.0, -2.0, 3.0]), ([1.0, 5.0, -1.0], [2.0, -5.0, 0.0], [3.0, 0.0, 1e-4])
    values = begin.copy()
    tensor = torch.tensor(begin).requires_grad_()
    optimizer = make([tensor])
    with poseidon.connect(master_port=free_port(), world_size=1, rank=0) as exchange:
        exchange.declare({"w": values})
        exchange.set_rule("w", poseidon.UpdateRule(kind))
        for gradient in gradients:
            exchange.push_pull("w", np.array(gradient), out=values)
            tensor.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.step()
    assert values.tolist() == tensor.tolist()
    assert values.tolist() != begin.tolist()


KINDS = {
    "sgd": poseidon.UpdateRule("sgd", lr=0.1),
    "sgd with momentum": poseidon.UpdateRule("sgd", lr=0.1, momentum=0.9, dampening=0.5),
    "adam": poseidon.UpdateRule("adam", lr=0.1),
    "none": poseidon.UpdateRule("none"),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ("sgd with momentum", "adam"),
        ("sgd", "none", "adam"),
        ("adam", "none", "adam"),
        ("adam", "sgd with momentum"),
        ("none", "sgd with momentum"),
    ],
)
def test_a_rule_of_another_kind_begins_as_a_new_optimizer_of_torch_does(kinds: tuple[str, ...]) -> None:
    values = np.ones(4)
    tensor = torch.ones(4, dtype=torch.float64, requires_grad=True)
    make = {
        "sgd": lambda: torch.optim.SGD([tensor], lr=0.1),
        "sgd with momentum": lambda: torch.optim.SGD([tensor], lr=0.1, momentum=0.9, dampening=0.5),
        "adam": lambda: torch.optim.Adam([tensor], lr=0.1),
    }
    with poseidon.connect(master_port=free_port(), world_size=1, rank=0) as exchange:
        exchange.declare({"w": values})
        for kind in kinds:
            exchange.set_rule("w", KINDS[kind])
            optimizer = make[kind]() if kind in make else None
            for step in range(3):
                gradient = np.array([0.3, -2.0, 1.5 * (step + 1), 0.01])
                exchange.push_pull("w", gradient, out=values)
                tensor.grad = torch.tensor(gradient)
                if optimizer:
                    optimizer.step()
                else:
                    tensor.data.copy_(tensor.grad)
    np.testing.assert_allclose(values, tensor.detach().numpy(), rtol=1e-12)


def rule_of_some(port: int, rates: list[float | None]) -> str:
    """What the rank is told that sets its rule; nothing may have changed in the arrays."""
    value = np.ones(100_000, "float32")
    try:
        with poseidon.connect(master_port=port, chunk_bytes=4096) as exchange:
            exchange.declare({"w": value})
            rate = rates[exchange.rank]
            if rate is not None:
                exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=rate))
            exchange.push_pull("w", np.full(100_000, 2, "float32"), out=value)
    except poseidon.Mismatch as error:
        assert np.all(value == 1)
        return str(error)
    return "no error"


@pytest.mark.parametrize("rates", [(0.1, None), (None, 0.1), (0.1, 0.2)])
def test_ranks_that_set_different_rules_are_told_so(rates: tuple[float | None, ...]) -> None:
    for text in workers.run(2, rule_of_some, free_port(), list(rates)):
        for part in ("'w'", "rank 0", "rank 1", "another update rule", "set_rule with the same rule"):
            assert part in text


def returned_in_bfloat16(port: int) -> list[list[float]]:
    """Rank 0 takes results with push_pull, and the others with push and pull. Thirds have more digits than bfloat16."""
    seen = []
    with poseidon.connect(master_port=port, chunk_bytes=1024, timeout=20, parameter_wire="bf16") as exchange:
        part, out = np.full(1000, exchange.rank + 1 / 3, "float32"), np.zeros(1000, "float32")
        exchange.declare({"sum": np.full(1000, 1 / 3, "float32"), "parameters": np.full(1000, 1 / 3, "float32")})

        def value(name: str) -> float:
            assert len(set(out.tolist())) == 1, name
            return float(out[0])

        exchange.pull("parameters", out)
        assert value("parameters") == np.float32(1 / 3)  # nothing was rounded yet
        exchange.barrier()
        exchange.set_rule("parameters", poseidon.UpdateRule("sgd", lr=0.1))
        for _ in range(2):
            for name in ("sum", "parameters"):
                if exchange.rank == 0:
                    exchange.push_pull(name, part, out=out)
                else:
                    exchange.push(name, part)
                    exchange.pull(name, out)
                seen.append(value(name))
        exchange.set_rule("parameters", poseidon.UpdateRule("none"))
        exchange.push_pull("parameters", part, out=out)
        seen.append(value("parameters"))
    return seen


def test_every_call_brings_the_same_rounded_parameters_and_exact_sums() -> None:
    answers = workers.run(3, returned_in_bfloat16, free_port())
    assert all(answer == answers[0] for answer in answers)
    mean = sum(np.float32(rank + 1 / 3) for rank in range(3)) / np.float32(3)
    first, second, third, fourth, last = map(np.float32, answers[0])
    assert {first, third, last} == {mean}
    for value, expected in ((second, 1 / 3 - 0.1 * mean), (fourth, 1 / 3 - 0.2 * mean)):
        assert value.view("uint32") % (1 << 16) == 0  # the digits of bfloat16
        assert abs(value - expected) < 2e-3
