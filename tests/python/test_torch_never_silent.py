"""What would train wrong without a word, in torch's class or in an earlier version of this one: works, or says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import poseidon.torch as poseidon
import workers
from poseidon.errors import PoseidonError
from torch_cases import all_equal, assert_close, digest, mean_loss, message_of, mlp, mlp_batch, parameters_digest, shard

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


# A model of which each rank has a part.


def of_shares() -> list[str]:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    sharded, by_columns = mlp(), mlp()
    fully_shard(sharded[0], mesh=mesh)
    parallelize_module(by_columns, mesh, {"2": ColwiseParallel()})
    texts = [message_of(lambda model=model: poseidon.DistributedDataParallel(model)) for model in (sharded, by_columns)]
    torch.distributed.destroy_process_group()
    return texts


def test_a_model_whose_parts_are_on_all_ranks_is_refused() -> None:
    for sharded, by_columns in workers.run(2, of_shares):
        assert "parameter 0.weight is a DTensor" in sharded
        assert "parameter 2.weight is a DTensor" in by_columns
        assert "a model of which there is one needs no wrapper" in sharded


# What is changed after wrapping.


Wrapped = poseidon.DistributedDataParallel


def unfreeze(model: Wrapped) -> None:
    model.module[2].requires_grad_(True)


def replace(model: Wrapped) -> None:
    model.module[4] = nn.Linear(40, 4)


def replace_weight(model: Wrapped) -> None:
    model.module[4].weight = nn.Parameter(torch.zeros(4, 40))


def add(model: Wrapped) -> None:
    model.module[4].register_parameter("scale", nn.Parameter(torch.ones(4)))


def add_to_container(model: Wrapped) -> None:
    model.module.scale = nn.Parameter(torch.ones(4))


def add_to_leaf(model: Wrapped) -> None:
    model.module[1].adapter = nn.Linear(64, 64)


def add_to_wrapper(model: Wrapped) -> None:
    model.head = nn.Linear(4, 4)


def replace_module(model: Wrapped) -> None:
    model.module = mlp()


def grow_module(model: Wrapped) -> None:
    model.module = nn.Sequential(model.module, nn.Linear(4, 4))


def reparametrize(model: Wrapped) -> None:
    nn.utils.parametrizations.weight_norm(model.module[4])


def assign(model: Wrapped) -> None:
    model.module.load_state_dict(mlp().state_dict(), assign=True)


def swap(model: Wrapped) -> None:
    torch.utils.swap_tensors(model.module[0].bias, nn.Parameter(torch.zeros(64)))


def convert(model: Wrapped) -> None:
    model.module.double()


def changed_later(change: Callable[[Wrapped], None], dtype: torch.dtype) -> str:
    module = mlp()
    module[2].requires_grad_(False)
    model = poseidon.DistributedDataParallel(module)
    mean_loss(model, *shard(0)).backward()
    model.zero_grad()
    with torch.no_grad():
        model(shard(0)[0])
    change(model)
    return message_of(lambda: mean_loss(model, *(tensor.to(dtype) for tensor in shard(1))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfreeze, "2.weight requires a gradient"),
        (replace, "4.weight"),
        (replace_weight, "4.weight"),
        (add, "4.scale"),
        (add_to_container, "parameter scale"),
        (add_to_leaf, "1.adapter.weight"),
        (add_to_wrapper, "head.weight"),
        (replace_module, "0.weight"),
        (grow_module, "1.weight"),
        (reparametrize, "4.parametrizations.weight"),
        (assign, "0.weight"),
        (swap, "0.bias has become another tensor"),
        (convert, "0.weight .*float64"),
    ],
)
def test_a_change_after_wrapping_is_noticed(change: Callable[[Wrapped], None], words: str) -> None:
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


def same_parameters(change: str) -> str:
    """Another module of the same parameters is the same model, and one without training is nobody's business."""
    module, reference = mlp(), mlp()
    model = poseidon.DistributedDataParallel(module)
    mean_loss(model, *shard(0)).backward()
    model.zero_grad()
    if change == "compiled":
        model.module = torch.compile(module, backend="eager")
    elif change == "other container":
        model.module = nn.Sequential(nn.Sequential(*module[:2]), *module[2:])
    elif change == "evaluated":
        model.module = mlp()
        with torch.no_grad():
            model(shard(0)[0])
        model.module = module
    else:
        model.metric = nn.Linear(4, 4).requires_grad_(False)
        model.other = poseidon.DistributedDataParallel(nn.Linear(4, 4))
    mean_loss(model, *shard(1)).backward()
    mean_loss(reference, *mlp_batch(1, 4 * poseidon.world_size())).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return digest(param.grad for param in module.parameters())


@pytest.mark.parametrize("change", ["compiled", "other container", "evaluated", "beside"])
def test_another_module_of_the_same_parameters_goes_on(change: str) -> None:
    assert all_equal(workers.run(2, same_parameters, change))


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


# Mistakes.


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
