"""What users of torch's DistributedDataParallel rely on."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.schemes import takes_factors
from poseidon.torch.tensors.pending_gradient import PendingGradient
from torch_cases import (
    EXACT_SCHEMES,
    all_equal,
    assert_close,
    assert_gradients_close,
    digest,
    mean_loss,
    mlp,
    mlp_batch,
    own_rows,
    parameters_digest,
    shard,
    wrap,
)


def with_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


def initial_state() -> tuple[str, str, bool]:
    torch.manual_seed(poseidon.rank())
    module = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Conv2d(3, 4, 3)).to(
        memory_format=torch.channels_last
    )
    module[1].running_mean.normal_()
    own = digest([*module.parameters(), *module.buffers()])
    poseidon.DistributedDataParallel(module)
    synced = digest([*module.parameters(), *module.buffers()])
    return own, synced, own == synced


def test_init_sync_takes_rank_zeros_state() -> None:
    answers = workers.run(3, initial_state)
    assert {synced for _, synced, _ in answers} == {answers[0][0]}
    assert [same for _, _, same in answers] == [True, False, False]


def broadcast_values() -> list[float]:
    tensors = [torch.full((5,), float(poseidon.rank())), torch.tensor(poseidon.rank() + 10), torch.empty(0)]
    large = torch.full((5_000_000,), poseidon.rank(), dtype=torch.float64)
    poseidon.broadcast([*tensors, large], root=1)
    poseidon.barrier()
    return [tensors[0].mean().item(), tensors[1].item(), large.min().item(), large.max().item()]


def test_broadcast() -> None:
    assert workers.run(3, broadcast_values) == [[1.0, 11, 1.0, 1.0]] * 3


class PartlyIgnored(nn.Module):
    """Parts that belong to a rank, of a shape of its own, beside a layer that is synchronized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(48, 4)
        self.own = nn.Linear(48, 2 + poseidon.rank())
        self.register_buffer("seen", torch.full((3 + poseidon.rank(),), float(poseidon.rank())))
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias", "seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + self.own(x).sum(1, keepdim=True)


def train_partly_ignored() -> tuple[str, str, list[float]]:
    module = PartlyIgnored()
    before = digest([module.own.weight, module.own.bias])
    model = poseidon.DistributedDataParallel(module)
    assert digest([module.own.weight, module.own.bias]) == before
    for step in range(2):
        model.zero_grad()
        mean_loss(model, *shard(step)).backward()
    assert module.own.weight.grad is not None
    return digest([module.shared.weight.grad]), digest([module.own.weight.grad]), module.seen.tolist()


def test_ignored_parameters_and_buffers_may_differ_in_shape() -> None:
    answers = workers.run(2, train_partly_ignored)
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] != answers[1][1]
    assert [seen for _, _, seen in answers] == [[0.0] * 3, [1.0] * 4]


def ignore_differently() -> str:
    module = mlp()
    if poseidon.rank() == 1:
        module._ddp_params_and_buffers_to_ignore = ["2.bias"]
    try:
        poseidon.DistributedDataParallel(module)
    except poseidon.PoseidonError as error:
        return f"{error.code}: {error}"
    return "nothing was raised"


def test_ranks_that_ignore_different_parameters_are_told() -> None:
    for answer in workers.run(2, ignore_differently):
        assert answer.startswith("mismatch")
        assert "2.bias" in answer


def buffers(broadcast: bool) -> tuple[str, str]:
    model = poseidon.DistributedDataParallel(with_norm(), broadcast_buffers=broadcast)
    for step in range(2):
        mean_loss(model, *shard(step)).backward()
    local = digest(model.buffers())
    model(shard(0)[0])
    model.eval()
    with torch.no_grad():
        model(shard(1)[0] if poseidon.rank() == 0 else shard(1)[0][:1])  # no exchange: any number of calls is fine
    return local, parameters_digest(model)


def test_buffers_are_those_of_rank_zero() -> None:
    follow = workers.run(2, buffers, True)
    assert follow[0][1] == follow[1][1]
    diverge = workers.run(2, buffers, False)
    assert diverge[0][0] != diverge[1][0]


def running_mean_after_forward() -> tuple[float, float]:
    module = nn.BatchNorm1d(48)
    model = poseidon.DistributedDataParallel(module)
    model(shard(0)[0]).sum().backward()
    before = module.running_mean.sum().item()
    with torch.enable_grad():
        model.eval()
        model(shard(0)[0])
    return before, module.running_mean.sum().item()


def test_forward_first_takes_over_the_buffers() -> None:
    (first, first_after), (second, second_after) = workers.run(2, running_mean_after_forward)
    assert first != second
    assert first_after == second_after == first


def held_gradients(scheme: str) -> list[bool]:
    """Under no_sync() `.grad` shows the local gradient to whoever looks, and can be cleared."""
    module = mlp()
    model, reference = wrap(module, scheme=scheme)
    mean_loss(model, *shard(0)).backward()  # the ranks agree on schemes
    weight, wanted = module[0].weight, reference[0].weight
    result = []
    model.zero_grad()
    with model.no_sync():
        mean_loss(model, *shard(1)).backward()
    mean_loss(reference, *shard(1)).backward()
    is_dense = scheme != "auto" and not takes_factors(scheme)
    result.append(is_dense or type(weight.grad) is PendingGradient)
    result.append(torch.allclose(weight.grad + 0, wanted.grad, atol=1e-6))
    result.append(type(weight.grad) is torch.Tensor)
    # Once looked at, it goes on as a dense gradient.
    mean_loss(model, *shard(2)).backward()
    # Cleared in between: what was held must not come back.
    for part in (model, reference):
        part.zero_grad()
    with model.no_sync():
        mean_loss(model, *shard(3)).backward()
    model.zero_grad()
    mean_loss(model, *shard(4)).backward()
    mean_loss(reference, *mlp_batch(4, 4 * poseidon.world_size())).backward()
    result.append(torch.allclose(weight.grad, wanted.grad, atol=1e-6))
    # Local training: the optimizer steps on held gradients.
    model.zero_grad()
    reference.zero_grad()
    reference.load_state_dict(module.state_dict())
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, reference)]
    with model.no_sync():
        mean_loss(model, *shard(5)).backward()
    mean_loss(reference, *shard(5)).backward()
    for optimizer in optimizers:
        optimizer.step()
    result.append(torch.allclose(weight, wanted, atol=1e-6))
    return result


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_held_gradients(scheme: str) -> None:
    for answer in workers.run(2, held_gradients, scheme):
        assert answer == [True] * 5


def input_buffer_reused(scheme: str) -> str:
    """The user may overwrite the input of an accumulated step before the synchronizing one."""
    model, reference = wrap(mlp(), scheme=scheme)
    size = poseidon.world_size()
    inputs = torch.empty(4, 48)
    for step in range(3):
        fresh, targets = mlp_batch(step, 4 * size)
        inputs.copy_(own_rows(fresh))
        mean_loss(reference, fresh, targets).backward()
        if step < 2:
            with model.no_sync():
                mean_loss(model, inputs, own_rows(targets)).backward()
        else:
            mean_loss(model, inputs, own_rows(targets)).backward()
    assert_gradients_close(model.module, reference)
    return digest(p.grad for p in model.parameters())


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_input_buffer_reused(scheme: str) -> None:
    assert all_equal(workers.run(2, input_buffer_reused, scheme))


def uneven_accumulation() -> str:
    """Ranks may accumulate over different numbers of micro-batches."""
    model, reference = wrap(mlp(), scheme="auto")
    size = poseidon.world_size()
    for step in range(4):
        model.zero_grad()
        reference.zero_grad()
        for rank in range(size):
            for micro in range(rank + 1):
                inputs, targets = mlp_batch(100 * step + 10 * rank + micro, 2)
                (mean_loss(reference, inputs, targets) / size).backward()
                if rank == poseidon.rank():
                    model.require_backward_grad_sync = micro == rank
                    mean_loss(model, inputs, targets).backward()
        assert_gradients_close(model.module, reference)
    return digest(p.grad for p in model.parameters())


def test_uneven_accumulation() -> None:
    assert all_equal(workers.run(3, uneven_accumulation))


def state_dict_interchange() -> bool:
    import torch.distributed as dist

    module = with_norm()
    model = poseidon.DistributedDataParallel(module)
    mean_loss(model, *shard(0)).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Without init_sync: gloo's thread frees the tensors that it sent under a lock which the group's destructor
        # waits for with the GIL held, and torch's views take the GIL to be freed, so once in some thousand runs that
        # hangs (seen with torch 2.13).
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        options = {"init_sync": False} if "init_sync" in known else {}
        theirs = nn.parallel.DistributedDataParallel(with_norm(), **options)
        theirs.load_state_dict(model.state_dict())
        model.load_state_dict(theirs.state_dict())
        equal = list(theirs.state_dict()) == list(model.state_dict())
        equal = equal and parameters_digest(theirs) == parameters_digest(model)
    finally:
        dist.destroy_process_group()
    plain = with_norm()
    plain.load_state_dict(module.state_dict())
    return equal and parameters_digest(plain) == parameters_digest(module)


def test_state_dicts_are_interchangeable_with_torchs() -> None:
    assert workers.run(2, state_dict_interchange) == [True, True]


def save_and_resume() -> tuple[str, str]:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        for step in which:
            optimizer.zero_grad()
            mean_loss(model, *shard(step)).backward()
            optimizer.step()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = poseidon.DistributedDataParallel(mlp(), scheme="auto")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    steps(model, optimizer, range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    steps(model, optimizer, range(3, 6))
    again, again_optimizer = build()
    saved.seek(0)
    state = torch.load(saved)
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    steps(again, again_optimizer, range(3, 6))
    assert_close(again, model)
    return parameters_digest(model), parameters_digest(again)


def test_save_and_resume() -> None:
    assert all_equal(workers.run(2, save_and_resume))


def copies() -> tuple[bool, ...]:
    module = mlp()
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    mean_loss(model, *shard(0)).backward()
    module.zero_grad()
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    reference = mlp()
    reference.load_state_dict(module.state_dict())
    mean_loss(reference, *shard(1)).backward()
    same = []
    for twin in twins:
        mean_loss(twin, *shard(1)).backward()
        assert_gradients_close(twin, reference)
        same.append(all(param.grad is None for param in module.parameters()))
    return tuple(same)


def test_the_module_can_be_copied() -> None:
    assert workers.run(2, copies) == [(True, True)] * 2


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies_of_the_wrapper(copied: Callable[[Any], Any]) -> tuple[str, str]:
    """A copy trains with the other ranks' copies, and apart from what it was copied from."""
    model = poseidon.DistributedDataParallel(mlp(), scheme="auto")
    mean_loss(model, *shard(0)).backward()
    if poseidon.rank() == 0:
        copied(model)  # which rank 0 alone may do: an average of weights that it keeps, a checkpoint
    twin = copied(model)
    model.zero_grad()
    twin.zero_grad()
    reference = mlp()
    mean_loss(twin, *shard(1)).backward()
    mean_loss(reference, *mlp_batch(1, 4 * poseidon.world_size())).backward()
    assert_gradients_close(twin.module, reference)
    assert all(param.grad is None for param in model.parameters())
    mean_loss(model, *shard(1)).backward()
    return digest(param.grad for param in twin.parameters()), digest(param.grad for param in model.parameters())


def averaged(model: nn.Module) -> nn.Module:
    twin = torch.optim.swa_utils.AveragedModel(model).module
    assert isinstance(twin, nn.Module)
    return twin


@pytest.mark.parametrize("copied", [copy.deepcopy, save_and_load, averaged])
def test_the_wrapper_can_be_copied(copied: Callable[[Any], Any]) -> None:
    answers = workers.run(2, copies_of_the_wrapper, copied)
    assert all_equal(answers)
    assert answers[0][0] == answers[0][1]


def rewrapped() -> str:
    """A module whose wrapper is gone is plain again; a new wrapper takes over."""
    module = mlp()
    first = poseidon.DistributedDataParallel(module, scheme="sfb")
    mean_loss(first, *shard(0)).backward()
    del first
    module.zero_grad()
    mean_loss(module, *shard(0)).backward()
    plain = mlp()
    mean_loss(plain, *shard(0)).backward()
    assert_gradients_close(module, plain)
    module.zero_grad()
    second = poseidon.DistributedDataParallel(module, scheme="auto")
    reference = mlp()
    mean_loss(second, *shard(1)).backward()
    mean_loss(reference, *mlp_batch(1, 4 * poseidon.world_size())).backward()
    assert_gradients_close(module, reference)
    return digest(p.grad for p in module.parameters())


def test_rewrapping() -> None:
    assert all_equal(workers.run(2, rewrapped))


def scaled(scheme: str) -> str:
    model, reference = wrap(mlp(), scheme=scheme)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, reference)]
    for step in range(3):
        inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
        batches = [(own_rows(inputs), own_rows(targets)), (inputs, targets)]
        for part, scaler, optimizer, batch in zip((model, reference), scalers, optimizers, batches, strict=True):
            optimizer.zero_grad()
            scaler.scale(mean_loss(part, *batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(part.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert_close(model.module, reference)
    return parameters_digest(model)


@pytest.mark.parametrize("scheme", ["auto", "ps"])
def test_scaler_and_clipping(scheme: str) -> None:
    assert all_equal(workers.run(2, scaled, scheme))


def scheme_mapping() -> dict[str, str]:
    model = poseidon.DistributedDataParallel(mlp(), scheme={"0": "sfb", "2.weight": "project_adam", "*": "ps"})
    mean_loss(model, *shard(0)).backward()
    return {row.layer: row.scheme for row in model.plan()}


def test_scheme_mapping() -> None:
    chosen = dict.fromkeys(("0.bias", "2.bias", "4.weight", "4.bias"), "ps")
    chosen.update({"0.weight": "sfb", "2.weight": "project_adam"})
    assert workers.run(2, scheme_mapping) == [chosen, chosen]


def statistics() -> tuple[Any, ...]:
    model = poseidon.DistributedDataParallel(mlp())
    model.record(True)
    before = model.synchronization_stats()
    for step in range(2):
        model.zero_grad()
        mean_loss(model, *shard(step)).backward()
    layers = model.synchronization_stats()
    ordered = all(
        layer.backward_begin_ns <= layer.gradient_ready_ns <= layer.started_ns <= layer.completed_ns
        and layer.gradient_ready_ns <= layer.backward_end_ns
        and 0.0 <= layer.hidden_share <= 1.0
        for layer in layers
    )
    text = str(model.plan(link_bits_per_s=1e9))
    return before, {layer.name: layer.factor_count for layer in layers}, ordered, len(model.recorded_steps()), text


def test_statistics_and_plan() -> None:
    for before, counts, ordered, steps, text in workers.run(2, statistics):
        assert before == []
        assert counts["0.weight"] == 8
        assert ordered
        assert steps == 2
        assert "0.weight" in text
        assert "factors" in text


def joined(counts: list[int], scheme: str, initial: bool) -> tuple[str, str]:
    """SGD over uneven inputs against the same rule written out in one process."""
    module = with_norm().eval()  # eval: batch statistics of uneven shards have no single-process counterpart
    model, reference = wrap(module, scheme=scheme)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, reference)]
    with model.join(divide_by_initial_world_size=initial):
        for step in range(counts[poseidon.rank()]):
            optimizers[0].zero_grad()
            mean_loss(model, *mlp_batch(100 * poseidon.rank() + step, 4)).backward()
            optimizers[0].step()
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if step < count]
        optimizers[1].zero_grad()
        for rank in active:
            loss = mean_loss(reference, *mlp_batch(100 * rank + step, 4))
            (loss / (len(counts) if initial else len(active))).backward()
        optimizers[1].step()
    assert_close(module, reference)
    # Outside join() all ranks train together again.
    model.zero_grad()
    mean_loss(model, *shard(0)).backward()
    return parameters_digest(model), digest(p.grad for p in model.parameters())


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
@pytest.mark.parametrize("counts", [[1, 4, 2], [0, 3, 3], [2, 2, 2], [0, 0, 0]])
def test_join(counts: list[int], scheme: str, initial: bool) -> None:
    assert all_equal(workers.run(3, joined, counts, scheme, initial))


def join_raises() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(1 + poseidon.rank()):
                mean_loss(model, *shard(step)).backward()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was raised"


def test_join_can_raise() -> None:
    for text in workers.run(2, join_raises):
        assert "[0]" in text
