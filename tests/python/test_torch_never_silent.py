"""What would train wrong without a word, in torch's class or in an earlier version of this one: works, or says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from torch_cases import (
    all_equal,
    assert_close,
    assert_gradients_close,
    digest,
    mean_loss,
    mlp,
    mlp_batch,
    own_rows,
    parameters_digest,
)


def shard(step: int) -> list[torch.Tensor]:
    return [own_rows(tensor) for tensor in mlp_batch(step, 4 * poseidon.world_size())]


def message_of(action: Callable[[], Any], kind: type[Exception] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


# A wrapper inside a wrapper.


def nested() -> list[str]:
    inner = poseidon.DistributedDataParallel(mlp())
    theirs = TorchDistributedDataParallel.__new__(TorchDistributedDataParallel)
    nn.Module.__init__(theirs)
    theirs.module = mlp()
    wrap = poseidon.DistributedDataParallel
    texts = [message_of(lambda model=model: wrap(model)) for model in (inner, nn.Sequential(inner), theirs)]
    # torch's around ours can be seen only in forward.
    TorchDistributedDataParallel._active_ddp_module = theirs
    try:
        texts.append(message_of(lambda: inner(shard(0)[0]), PoseidonError))
    finally:
        TorchDistributedDataParallel._active_ddp_module = None
    return texts


def test_a_wrapper_inside_a_wrapper_is_refused() -> None:
    for ours, inside, theirs, around in workers.run(2, nested):
        assert "wrapped twice" in ours
        assert "'0'" in inside
        assert "wrapped twice" in theirs
        assert "inside another DistributedDataParallel" in around


def nested_in_turn() -> str:
    """Two models whose forward passes call each other's modules, not wrappers, are no nesting."""
    first, second = (poseidon.DistributedDataParallel(mlp()) for _ in range(2))
    (mean_loss(first, *shard(0)) + mean_loss(second, *shard(1))).backward()
    return digest(param.grad for model in (first, second) for param in model.parameters())


def test_two_wrappers_side_by_side() -> None:
    assert all_equal(workers.run(2, nested_in_turn))


# What is changed after wrapping.


def unfreeze(module: nn.Module) -> None:
    module[2].requires_grad_(True)


def replace(module: nn.Module) -> None:
    module[4] = nn.Linear(40, 4)


def add(module: nn.Module) -> None:
    module[4].register_parameter("scale", nn.Parameter(torch.ones(4)))


def convert(module: nn.Module) -> None:
    module.double()


def changed_later(change: Callable[[nn.Module], None], dtype: torch.dtype) -> str:
    module = mlp()
    module[2].requires_grad_(False)
    model = poseidon.DistributedDataParallel(module)
    mean_loss(model, *shard(0)).backward()
    with torch.no_grad():
        model(shard(0)[0])
    change(module)
    return message_of(lambda: mean_loss(model, *(tensor.to(dtype) for tensor in shard(1))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "2.weight requires a gradient"),
        (replace, "4.weight"),
        (add, "4.scale"),
        (convert, "0.weight .*float64"),
    ],
)
def test_a_change_after_wrapping_is_noticed(change: Callable[[nn.Module], None], words: str) -> None:
    dtype = torch.float64 if change is convert else torch.float32
    for text in workers.run(2, changed_later, change, dtype):
        assert re.search(words, text), text
        assert "wrap" in text


def harmless_changes() -> str:
    """Freezing, and parts without parameters, need no new wrapper."""
    module = mlp()
    model = poseidon.DistributedDataParallel(module)
    mean_loss(model, *shard(0)).backward()
    module[1] = nn.ReLU()
    module[0].requires_grad_(False)
    module[0].zero_grad()
    mean_loss(model, *shard(1)).backward()
    assert module[0].weight.grad is None
    return digest(param.grad for param in module[2:].parameters())


def test_harmless_changes_after_wrapping() -> None:
    assert all_equal(workers.run(2, harmless_changes))


# Optimizers that run in backward.


def optimizer_in_backward(steps: int) -> str:
    module, reference = mlp(), mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1, "momentum": 0.9})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    model = poseidon.DistributedDataParallel(module)
    for step in range(steps):
        mean_loss(model, *shard(step)).backward()
        assert all(param.grad is None for param in module.parameters())
        optimizer.zero_grad()
        mean_loss(reference, *mlp_batch(step, 4 * poseidon.world_size())).backward()
        optimizer.step()
    assert_close(module, reference)
    return parameters_digest(module)


def test_optimizers_in_backward_see_the_mean() -> None:
    assert all_equal(workers.run(2, optimizer_in_backward, 3))


# Buffers.


class Counted(nn.Module):
    """A linear layer whose output depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(48, 4)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.offset


def evaluated(sends: bool) -> list[float]:
    model = poseidon.DistributedDataParallel(Counted(), forward_sync_buffers=sends)
    mean_loss(model, *shard(0)).backward()
    model.module.offset.fill_(1.0 + poseidon.rank())
    inputs = mlp_batch(1, 4)[0]
    model.eval()
    with torch.no_grad():
        first = model(inputs).mean().item()
        model.module.offset.fill_(5.0 + poseidon.rank())
        again = model(inputs).mean().item()  # no second exchange: ranks may have different numbers of batches
    return [first, again]


def test_evaluation_uses_rank_zeros_buffers() -> None:
    (first, again), (other, other_again) = workers.run(2, evaluated, True)
    assert first == other
    assert other_again - again == pytest.approx(1.0, abs=1e-5)


def test_buffers_stay_where_forward_does_not_send_them() -> None:
    (first, _), (other, _) = workers.run(2, evaluated, False)
    assert other - first == pytest.approx(1.0, abs=1e-5)


def rank_zero_alone_evaluates() -> str:
    """As torch's class: its exchange of buffers pairs with the one that begins the others' next training pass."""
    model = poseidon.DistributedDataParallel(Counted())
    for step in range(3):
        mean_loss(model, *shard(step)).backward()
        if poseidon.rank() == 0:
            with torch.no_grad():
                model(shard(step)[0])
                model(shard(step)[0])
    return digest(param.grad for param in model.parameters())


def test_rank_zero_may_evaluate_alone() -> None:
    assert all_equal(workers.run(2, rank_zero_alone_evaluates))


def buffers_at_start(**options: bool) -> float:
    module = Counted()
    module.offset.fill_(float(poseidon.rank()))
    poseidon.DistributedDataParallel(module, **options)
    return module.offset.item()


@pytest.mark.filterwarnings("ignore:broadcast_buffers")
def test_buffers_at_the_start_are_sent_as_by_torchs_class() -> None:
    assert workers.run(2, buffers_at_start) == [0.0, 0.0]
    assert [workers.run(2, without_buffers)[rank] for rank in range(2)] == [0.0, 1.0]


def without_buffers() -> float:
    return buffers_at_start(broadcast_buffers=False)


class Scaled(Counted):
    """Saves its buffer for backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.offset


def two_passes_before_backward() -> str:
    module = Scaled()
    module.offset.fill_(2.0)
    model = poseidon.DistributedDataParallel(module)
    (model(shard(0)[0]).mean() + model(shard(1)[0]).mean()).backward()
    return digest(param.grad for param in module.parameters())


def test_buffers_sent_again_do_not_break_an_earlier_pass() -> None:
    assert all_equal(workers.run(2, two_passes_before_backward))


def synchronized_norm() -> str:
    return message_of(lambda: poseidon.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))))


def test_synchronized_batch_norm_needs_torch_distributed() -> None:
    for text in workers.run(2, synchronized_norm):
        assert "init_process_group" in text


# torch.compile around the wrapper.


def compiled_around() -> str:
    model = poseidon.DistributedDataParallel(nn.Sequential(mlp(), nn.BatchNorm1d(4)))
    reference = nn.Sequential(mlp(), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(compiled, *shard(step)).backward()
        optimizer.step()
    assert reference[1].running_mean is not None
    return parameters_digest(model)


def test_torch_compile_around_a_wrapper_with_buffers() -> None:
    assert all_equal(workers.run(2, compiled_around))


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


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: poseidon.DistributedDataParallel(None), "module must be a torch.nn.Module"),
    (lambda: poseidon.DistributedDataParallel(nn.LazyLinear(3)), "weight is uninitialized"),
    (lambda: poseidon.DistributedDataParallel(mlp(), device_ids=0), "device_ids is 0"),
    (lambda: poseidon.DistributedDataParallel(mlp(), device_mesh=3), "device_mesh is of type int"),
    (lambda: poseidon.DistributedOptimizer(3, poseidon.DistributedDataParallel(mlp())), "optimizer is of type int"),
]


def mistakes() -> list[str]:
    return [message_of(action) for action, _ in MISTAKES]


def test_mistakes_are_told_in_one_sentence() -> None:
    for texts in workers.run(1, mistakes):
        for text, (_, words) in zip(texts, MISTAKES, strict=True):
            assert words in text
            assert "scheme" not in text
