"""Updates that wait for their gradients, with several models and optimizers, compiled parts, and jobs that end."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import Model, assert_same_training, own_batch, plain_loop, train_step, wrapped
from torch_cases import all_equal, digest, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


def same_with_and_without(train: Any, *args: Any) -> str:
    """`train(overlap)` gives the same digest with and without."""
    digests = [train(overlap, *args) for overlap in (True, False)]
    assert digests[0] == digests[1]
    return digests[0]


# Several optimizers and models.


def several_optimizers(overlap: bool, scheme: str) -> str:
    """Two for disjoint parts of a model, one plain one, one parameter in none."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(*[nn.Linear(48, 48) for _ in range(5)]), scheme=scheme)
    params = list(model.parameters())
    optimizers: list[Any] = [SGD(params[1:4], lr=0.1, momentum=0.9), Adam(params[4:6], lr=0.01), AdamW(params[6:])]
    if overlap:
        optimizers[0] = poseidon.DistributedOptimizer(optimizers[0], model)
        optimizers[2] = poseidon.DistributedOptimizer(optimizers[2], model, update="worker")
    targets = torch.ones(2 * poseidon.world_size(), 48)
    for step in range(5):
        inputs = mlp_batch(step, 2 * poseidon.world_size())[0]
        model.zero_grad()
        mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
        assert params[0].grad is not None
        for optimizer in optimizers[: 2 + step % 2]:  # the last one steps now and then
            optimizer.step()
    return parameters_digest(model) + digest(param.grad for param in params)


@pytest.mark.parametrize("scheme", ["ps", "auto"])
def test_several_optimizers_of_one_model(scheme: str) -> None:
    assert all_equal(workers.run(2, same_with_and_without, several_optimizers, scheme, small_bytes=512))


def on_servers_and_workers(overlap: bool) -> str:
    module = mlp()
    model = Model(module, scheme="ps")
    optimizers: list[Any] = [
        SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (module[0], module[2], module[4])
    ]
    if overlap:
        updates = ("worker", "server", "worker")
        optimizers = [
            poseidon.DistributedOptimizer(optimizer, model, update=update)
            for optimizer, update in zip(optimizers, updates, strict=True)
        ]
    for step in range(5):
        model.zero_grad()
        mean_loss(model, *own_batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return parameters_digest(model)


def test_updates_on_servers_and_workers_side_by_side() -> None:
    assert all_equal(workers.run(2, same_with_and_without, on_servers_and_workers))


def adversarial(overlap: bool, freeze: bool) -> str:
    """Two models, each used in the other's step."""
    torch.manual_seed(0)
    maker = Model(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 48)))
    judge = Model(nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizers: list[Any] = [Adam(model.parameters(), lr=0.01) for model in (maker, judge)]
    if overlap:
        optimizers = [
            poseidon.DistributedOptimizer(one, model) for one, model in zip(optimizers, (maker, judge), strict=True)
        ]
    of_maker, of_judge = optimizers
    for step in range(5):
        real = own_rows(mlp_batch(step, 4 * poseidon.world_size())[0])
        made = maker(real[:, :8])
        of_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
        of_judge.step()
        for param in judge.parameters():
            param.requires_grad_(not freeze)
        of_maker.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        of_maker.step()
        for param in judge.parameters():
            param.requires_grad_(True)
    return parameters_digest(maker) + parameters_digest(judge)


@pytest.mark.parametrize("freeze", [False, True])
def test_two_models_in_each_others_steps(freeze: bool) -> None:
    assert all_equal(workers.run(2, same_with_and_without, adversarial, freeze))


def one_for_two_models(overlap: bool) -> str:
    """The second model's gradients are waited for at the end of backward."""
    first, second = Model(mlp()), Model(mlp())
    optimizer: Any = momentum(itertools.chain(first.parameters(), second.parameters()))
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, first)
    for step in range(4):
        optimizer.zero_grad()
        (mean_loss(first, *own_batch(step)) + mean_loss(second, *own_batch(step + 1))).backward()
        optimizer.step()
    return parameters_digest(first) + parameters_digest(second)


def test_one_optimizer_for_two_models() -> None:
    assert all_equal(workers.run(2, same_with_and_without, one_for_two_models))


def grows(overlap: bool) -> str:
    module = mlp()
    model = Model(module)
    optimizer: Any = momentum(module[0].parameters())
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    for step in range(6):
        if step in (2, 4):
            optimizer.add_param_group({"params": list(module[step].parameters()), "lr": 0.01 * step})
        train_step(model, optimizer, step)
    assert len(optimizer.param_groups) == 3
    return parameters_digest(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_are_added_later(world_size: int) -> None:
    assert all_equal(workers.run(world_size, same_with_and_without, grows))


def wrapped_late(overlap: bool) -> str:
    """An optimizer that has stepped already; the second of two checkpoints is loaded without wrapping."""
    model, optimizer = wrapped(False, momentum)
    plain_loop(model, optimizer, 2)
    inner = optimizer
    if overlap:
        optimizer = poseidon.DistributedOptimizer(inner, model)
    plain_loop(model, optimizer, 3)
    saved = optimizer.state_dict()
    other, later = wrapped(False, momentum)
    other.load_state_dict(model.state_dict())
    later.load_state_dict(saved)
    plain_loop(other, later, 2)
    return parameters_digest(other)


def test_wrapping_late_and_unwrapping() -> None:
    assert all_equal(workers.run(2, same_with_and_without, wrapped_late))


# Uneven data.


def joined(overlap: bool, divide: bool) -> str:
    model, optimizer = wrapped(overlap, momentum)
    with model.join(divide_by_initial_world_size=divide):
        for step in range(2 + 2 * poseidon.rank()):
            train_step(model, optimizer, step)
    return parameters_digest(model)


@pytest.mark.parametrize("divide", [True, False])
def test_join(divide: bool) -> None:
    assert all_equal(workers.run(3, same_with_and_without, joined, divide))


def beside_a_join(joined_first: bool, more: int) -> str:
    """Two models, of which one is joined. Rank 1 makes so many steps more than rank 0."""
    poseidon.init()
    models = [poseidon.DistributedDataParallel(mlp()) for _ in range(2)]
    try:
        with models[0].join():
            for step in range(2 + more * poseidon.rank()):
                for model in models if joined_first else models[::-1]:
                    mean_loss(model, *own_batch(step)).backward()
    except poseidon.PoseidonError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        poseidon.shutdown()
    return parameters_digest(models[1])


@pytest.mark.parametrize("joined_first", [True, False])
def test_a_model_beside_one_that_is_joined_needs_all_ranks(joined_first: bool) -> None:
    """The rank that has data is refused at once, and so is the one without."""
    answers = workers.run_fresh(2, beside_a_join, joined_first, 1)
    both = "a step of another model and a rank without data in join()"
    assert answers[1].startswith(f"InvalidArgument: {both} exclude each other: ")
    assert "Join([model, other])" in answers[1]
    assert answers[0] == answers[1]
    assert all_equal(workers.run_fresh(2, beside_a_join, joined_first, 0))


# Compiled parts, in which uses of parameters are not seen.


class Parts(nn.Module):
    """Two blocks, compiled by turns, and a layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 48)
        block: Any = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
        if how == "scripted":
            block = torch.jit.script(block)
        elif how == "block":
            block = torch.compile(block, backend="aot_eager")
        elif how == "in place":
            block.compile(backend="aot_eager")
        self.block = block
        self.last = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.block(torch.tanh(self.first(x)))))


def compiled(how: str) -> str:
    def loop(model: Any, optimizer: Any) -> list[Any]:
        faster = torch.compile(model, backend="aot_eager") if how == "model" else model
        losses = plain_loop(faster, optimizer, 4)
        with torch.no_grad():
            return [losses, faster(own_batch(7)[0]).tolist()]

    # The first scripted training of a process has other roundings than all later ones.
    plain_loop(*wrapped(False, momentum, Parts(how)), steps=4)
    return assert_same_training(loop, momentum, lambda: Parts(how))


@pytest.mark.parametrize("how", ["scripted", "block", "in place", "model"])
def test_compiled_parts(how: str) -> None:
    torch.compiler.reset()
    assert all_equal(workers.run(2, compiled, how))


def compiled_after_another_backward(how: str) -> str:
    """One without a forward pass of the whole model before it: what it leaves behind disturbs no compiled part."""

    def loop(model: Any, optimizer: Any) -> list[float]:
        torch.compiler.reset()  # what ran before in this process counts towards the limit of compilations
        faster = torch.compile(model, backend="aot_eager") if how == "model" else model
        losses = plain_loop(faster, optimizer, 2)
        (model.module.first.bias * 2).sum().backward()
        return losses + plain_loop(faster, optimizer, 3)

    plain_loop(*wrapped(False, momentum, Parts(how)), steps=4)
    return assert_same_training(loop, momentum, lambda: Parts(how))


@pytest.mark.parametrize("how", ["scripted", "block", "in place", "model"])
def test_compiled_parts_after_another_backward(how: str) -> None:
    torch.compiler.reset()
    assert all_equal(workers.run(2, compiled_after_another_backward, how))


# What is in flight when a job ends.


def ends_after_step() -> list[str]:
    model, optimizer = wrapped(True, momentum)
    expected, plain = wrapped(False, momentum)
    plain_loop(expected, plain, 2)
    plain_loop(model, optimizer, 2)
    del optimizer
    poseidon.shutdown()
    return [parameters_digest(model), parameters_digest(expected)]


def initialized(function: Any, *args: Any) -> Any:
    poseidon.init()
    return function(*args)


def test_shutdown_waits_for_the_last_updates() -> None:
    answers = workers.run_fresh(2, initialized, ends_after_step)
    assert answers[0] == answers[1]
    assert answers[0][0] == answers[0][1]


def forgotten() -> str:
    """The optimizer, or even the wrapper, is gone before the updates are made."""
    digests = []
    for overlap in (True, False):
        module = mlp()
        model, optimizer = wrapped(overlap, momentum, module)
        plain_loop(model, optimizer, 2)
        del model, optimizer
        digests.append(parameters_digest(module))
    assert digests[0] == digests[1]
    return digests[0]


def test_updates_outlive_the_optimizer() -> None:
    assert all_equal(workers.run(2, forgotten))


def timings() -> list[int]:
    """Records of steps are complete, however long after backward an exchange ends."""
    model, optimizer = wrapped(True, momentum)
    model.record()
    plain_loop(model, optimizer, 3)
    steps = model.recorded_steps()
    assert [layer.name for layer in model.synchronization_stats()] == [layer.name for layer in steps[-1].layers]
    for step in steps:
        assert all(layer.completed_ns >= layer.started_ns >= step.backward_begin_ns for layer in step.layers)
    return [len(step.layers) for step in steps]


def test_records_of_steps() -> None:
    assert workers.run(2, timings) == [[6, 6, 6]] * 2


def memory_of(kind: type[Optimizer]) -> tuple[int, int, int]:
    model, optimizer = wrapped(True, kind)
    train_step(model, optimizer, 0)
    memory = optimizer.memory()
    return memory.this_process, memory.worker_side, sum(param.nbytes for param in model.parameters())


def test_memory_is_on_the_worker() -> None:
    for here, everywhere, size in workers.run(2, memory_of, Adam):
        assert here == everywhere == 2 * size
