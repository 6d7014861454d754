"""Updates in flight, and what else looks at a module meanwhile: compiled functions, and checks of what it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import assert_same_training, own_batch, train_step, wrapped
from torch_cases import all_equal, digest, mean_loss, parameters_digest

UPDATES = ["worker", "server"]


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01)


def average_by_compiled_code(update: str) -> tuple[int, str]:
    """How often the function is compiled, and the averages."""
    torch._dynamo.reset()
    count = 0

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return graph.forward  # type: ignore[no-any-return]

    @torch.compile(backend=compiler, fullgraph=True)
    def average(averages: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(averages, values, 0.1)

    model, optimizer = wrapped(True, adamw, scheme="ps", update=update)
    averages = [param.detach().clone() for param in model.parameters()]
    for step in range(12):
        train_step(model, optimizer, step)
        with torch.no_grad():
            average(averages, list(model.parameters()))
    torch._dynamo.reset()
    return count, digest(averages)


@pytest.mark.parametrize("update", UPDATES)
def test_a_compiled_function_of_parameters_is_compiled_twice_at_most(update: str) -> None:
    counts, averages = zip(*workers.run(2, average_by_compiled_code, update), strict=True)
    assert all(1 <= count <= 2 for count in counts), counts
    assert all_equal(list(averages))


def evaluate_by_compiled_code(update: str) -> str:
    """Rank 0 alone evaluates, so that its updates are made in torch's callback before it compiles."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(4):
            losses.append(train_step(model, optimizer, step))
            if poseidon.rank() == 0:
                net = model.module
                torch._dynamo.reset()
                compiled = torch.compile(lambda x, net=net: net(x), backend="eager")
                with torch.no_grad():
                    compiled(own_batch(step)[0])
        return losses

    return assert_same_training(loop, adamw, scheme="ps", update=update)


@pytest.mark.parametrize("update", UPDATES)
def test_updates_made_while_torch_compiles_have_the_same_bits(update: str) -> None:
    assert all_equal(workers.run(2, evaluate_by_compiled_code, update))


def replace_a_parameter(update: str, after_another_change: bool) -> str:
    model, optimizer = wrapped(True, adamw, scheme="ps", update=update)
    for step in range(2):
        train_step(model, optimizer, step)
    if after_another_change:
        model.module.add_module("more", nn.Identity())
        train_step(model, optimizer, 2)
        optimizer.synchronize()
    model.module[0].bias = nn.Parameter(torch.zeros_like(model.module[0].bias))
    with pytest.raises(poseidon.PoseidonError) as caught:
        mean_loss(model, *own_batch(3))
    return str(caught.value)


@pytest.mark.parametrize("after_another_change", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_a_parameter_that_is_replaced_in_flight_is_refused_in_the_next_pass(
    update: str, after_another_change: bool
) -> None:
    for text in workers.run_fresh(2, initialized, replace_a_parameter, update, after_another_change):
        assert "parameter 0.bias was put into the model after it was wrapped" in str(text), text


def initialized(function: Any, *args: Any) -> Any:
    poseidon.init()
    return function(*args)


def delete_a_parameter(update: str) -> str:
    """One that has no gradient any more, while others are in flight."""
    model, optimizer = wrapped(True, adamw, scheme="ps", update=update)
    train_step(model, optimizer, 0)
    unused = model.module[0].bias
    del model.module[0].bias
    model.module[0].register_parameter("bias", unused)
    train_step(model, optimizer, 1)
    optimizer.synchronize()
    assert list(model.module[0]._parameters) == ["weight", "bias"]
    return parameters_digest(model)


@pytest.mark.parametrize("update", UPDATES)
def test_a_parameter_may_be_taken_out_and_put_back(update: str) -> None:
    assert all_equal(workers.run(2, delete_a_parameter, update))
