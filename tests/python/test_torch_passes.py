"""Which backward passes exchange gradients, and modules and parameters that are not only one wrapper's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from torch_cases import (
    all_equal,
    assert_close,
    assert_gradients_close,
    digest,
    mean_loss,
    message_of,
    mlp,
    mlp_batch,
    parameters_digest,
    shard,
)

# Which backward passes are the wrapper's.


def looked_at_gradients() -> str:
    """Each rank makes a backward pass of its own in between, past the wrapper, at another time."""
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        mean_loss(model, *shard(step)).backward()
        optimizer.step()
        if step == 1 + poseidon.rank():
            model.module(shard(step)[0]).sum().backward()
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        mean_loss(reference, *mlp_batch(step, 4 * poseidon.world_size())).backward()
        optimizer.step()
    assert_close(model.module, reference)
    return parameters_digest(model)


def test_a_backward_past_the_wrapper_is_no_step() -> None:
    assert all_equal(workers.run(2, looked_at_gradients))


def local_pass_in_between(scheme: str) -> str:
    """A forward pass under no_sync() does not make the earlier one's backward local."""
    model, reference = poseidon.DistributedDataParallel(mlp(), scheme=scheme), mlp()
    first, second = shard(0), shard(1)
    loss = mean_loss(model, *first)
    with model.no_sync():
        other = mean_loss(model, *second)
    (loss + other).backward()
    whole = [mlp_batch(step, 4 * poseidon.world_size()) for step in range(2)]
    (mean_loss(reference, *whole[0]) + mean_loss(reference, *whole[1])).backward()
    assert_gradients_close(model.module, reference)
    return digest(param.grad for param in model.parameters())


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_a_local_pass_in_between(scheme: str) -> None:
    assert all_equal(workers.run(2, local_pass_in_between, scheme))


def two_backward_passes(scheme: str) -> str:
    """Of two forward passes, one after the other, and of one graph twice."""
    model, reference = poseidon.DistributedDataParallel(mlp(), scheme=scheme), mlp()
    losses = [mean_loss(model, *shard(step)) for step in range(2)]
    wanted = [mean_loss(reference, *mlp_batch(step, 4 * poseidon.world_size())) for step in range(2)]
    for loss in (losses[0], losses[1], losses[1]):
        loss.backward(retain_graph=True)
    (wanted[0] + 2 * wanted[1]).backward()
    assert_gradients_close(model.module, reference)
    return digest(param.grad for param in model.parameters())


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_several_backward_passes_after_several_forward_passes(scheme: str) -> None:
    assert all_equal(workers.run(2, two_backward_passes, scheme))


def cleared_on_one_rank(scheme: str) -> str:
    """Gradients are averaged as they are, whoever has cleared them."""
    model = poseidon.DistributedDataParallel(mlp(), scheme=scheme)
    mean_loss(model, *shard(0)).backward()
    with torch.no_grad():
        if poseidon.rank() == 0:
            model.zero_grad()
        else:
            model.module[0].weight.grad.data.add_(1.0)  # which leaves no trace in the tensor's version
    mean_loss(model, *shard(1)).backward()
    return digest(param.grad for param in model.parameters())


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_gradients_that_differ_before_backward_do_not_differ_after(scheme: str) -> None:
    assert all_equal(workers.run(2, cleared_on_one_rank, scheme))


# Modules and parameters that are not only this wrapper's.


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


def other_class() -> str:
    module, reference = mlp(), mlp()
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    for part in (module, reference):
        part[0].__class__ = Doubled
    mean_loss(model, *shard(0)).backward()
    mean_loss(reference, *mlp_batch(0, 4 * poseidon.world_size())).backward()
    assert_gradients_close(module, reference)
    return digest(param.grad for param in model.parameters())


def test_a_layer_whose_class_is_changed_after_wrapping() -> None:
    assert all_equal(workers.run(2, other_class))


def shared_encoder(scheme: str, together: bool) -> str:
    """Two wrapped models with one encoder, as actor and critic have it."""

    def build() -> list[nn.Module]:
        encoder = mlp()
        return [nn.Sequential(encoder, nn.Linear(4, 3)), nn.Sequential(encoder, nn.Linear(4, 2))]

    torch.manual_seed(3)
    modules = build()
    torch.manual_seed(3)
    references = build()
    models = [poseidon.DistributedDataParallel(module, scheme=scheme) for module in modules]
    for step in range(3):
        inputs, whole = shard(step)[0], mlp_batch(step, 4 * poseidon.world_size())[0]
        for model in (*models, *references):
            model.zero_grad()
        losses = [model(inputs).square().mean() for model in models]
        if together:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        sum(reference(whole).square().mean() for reference in references).backward()
        for module, reference in zip(modules, references, strict=True):
            assert_gradients_close(module, reference)
    return digest(param.grad for module in modules for param in module.parameters())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_two_wrapped_models_share_parameters(scheme: str, together: bool) -> None:
    assert all_equal(workers.run(2, shared_encoder, scheme, together))


def shared_with_an_optimizer() -> list[str]:
    module = mlp()
    first = poseidon.DistributedDataParallel(module)
    second = poseidon.DistributedDataParallel(nn.Sequential(module, nn.Linear(4, 2)))
    taken = poseidon.DistributedDataParallel(mlp())
    poseidon.DistributedOptimizer(torch.optim.SGD(taken.parameters(), lr=0.1), taken)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    texts = [message_of(lambda: poseidon.DistributedOptimizer(optimizer, first))]
    texts.append(message_of(lambda: poseidon.DistributedDataParallel(nn.Sequential(taken.module, nn.Linear(4, 2)))))
    assert second is not None
    return texts


def test_shared_parameters_and_a_distributed_optimizer_exclude_each_other() -> None:
    for both, later in workers.run(2, shared_with_an_optimizer):
        assert "two wrapped models" in both
        assert "another wrapped model" in later


class Repeated(nn.Module):
    """One block twice, by reentrant checkpoints: its parameters get gradients twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.block, torch.tanh(hidden), use_reentrant=True)
        return self.last(hidden)


def repeated_block() -> str:
    model, reference = poseidon.DistributedDataParallel(Repeated(), static_graph=True), Repeated()
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        mean_loss(model, *shard(step)).backward()
        mean_loss(reference, *mlp_batch(step, 4 * poseidon.world_size())).backward()
        assert_gradients_close(model.module, reference)
    return digest(param.grad for param in model.parameters())


def test_static_graph_takes_gradients_that_come_in_parts() -> None:
    assert all_equal(workers.run(2, repeated_block))


def compiled_step() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        mean_loss(model, inputs, targets).backward()
        optimizer.step()

    reference = mlp()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        step(*shard(number))
        plain.zero_grad()
        mean_loss(reference, *mlp_batch(number, 4 * poseidon.world_size())).backward()
        plain.step()
    assert_close(model.module, reference)
    return parameters_digest(model)


def test_torch_compile_around_a_whole_step() -> None:
    assert all_equal(workers.run(2, compiled_step))
