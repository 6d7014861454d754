"""Gradients that do not come plainly from one use of one layer: exact, by factors where safe, dense where not."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from torch_cases import (
    EXACT_SCHEMES,
    all_equal,
    assert_gradients_close,
    compare_gradients,
    digest,
    mean_loss,
    mlp,
    mlp_batch,
    own_rows,
    wrap,
)
from waiting import meet

SIZE = 48


def rows_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return mlp_batch(step, 4 * poseidon.world_size())


class OneLinear(nn.Module):
    """A square layer that subclasses use in their own ways, between two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(x)))


class Reused(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(torch.tanh(self.inner(torch.tanh(self.inner(x))))))


class TiedLinears(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(SIZE, SIZE)
        self.second.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(torch.tanh(self.inner(x))))


class UsedOutside(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.inner.weight.square().mean()


class UsedOutsideOnRankZero(OneLinear):
    """Data-dependent: the same weight is dense on one rank and factors on the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        marked = (x[:, :1] > 0).to(x.dtype)
        if marked.sum() > x.shape[0] / 2:
            result = result + marked.mean() * self.inner.weight.square().mean()
        return result


class UsedOutsideUnderAutocast(OneLinear):
    """The second use would find the first one's cast weight in autocast's cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(torch.tanh(self.inner(x)), self.inner.weight))


class UsedAsFunction(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(F.linear(x, self.inner.weight, self.inner.bias)))


class Parametrized(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.inner)


class Checkpointed(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda value: torch.tanh(self.inner(value)), x, use_reentrant=False)
        return self.out(hidden)


class CheckpointedReentrant(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda value: torch.tanh(self.inner(value)), x.requires_grad_(), use_reentrant=True)
        return self.out(hidden)


class OneDimensionalInput(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(OneDimensionalInput, self).forward(row) for row in x])


class ManyDimensionalInput(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(2, -1, 1, SIZE)).reshape(-1, 4)


class NonContiguousInput(OneLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.t().contiguous().t())


class Expanded(OneLinear):
    """Its gradient arrives expanded (strides of zero) and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.sum() + self.scale.t().sum(1).sum()


class ZeroSized(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


class Frozen(OneLinear):
    def __init__(self) -> None:
        super().__init__()
        self.inner.weight.requires_grad_(False)


MODULES = [
    OneLinear,
    Reused,
    TiedLinears,
    UsedOutside,
    UsedAsFunction,
    Parametrized,
    Checkpointed,
    CheckpointedReentrant,
    OneDimensionalInput,
    ManyDimensionalInput,
    NonContiguousInput,
    Expanded,
    ZeroSized,
    Frozen,
]


def gradients_of(kind: type[nn.Module], scheme: str) -> tuple[str, list[str]]:
    return compare_gradients(kind(), rows_batch, mean_loss, scheme=scheme)


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
@pytest.mark.parametrize("kind", MODULES)
def test_gradients(kind: type[nn.Module], scheme: str) -> None:
    assert all_equal(workers.run(2, gradients_of, kind, scheme))


@pytest.mark.parametrize("kind", [OneLinear, Reused, TiedLinears, Checkpointed, ManyDimensionalInput])
def test_factors_are_used_where_safe(kind: type[nn.Module]) -> None:
    assert "inner.weight sfb" in workers.run(2, gradients_of, kind, "auto")[0][1]


@pytest.mark.parametrize("kind", [UsedOutside, UsedAsFunction])
def test_no_factors_where_the_weight_is_used_outside(kind: type[nn.Module]) -> None:
    assert "inner.weight ps" in workers.run(2, gradients_of, kind, "auto")[0][1]


def some_rank_uses_the_weight_outside(scheme: str) -> str:
    module = UsedOutsideOnRankZero()

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = rows_batch(step)
        inputs[:, 0] = -1
        inputs[: inputs.shape[0] // poseidon.world_size(), 0] = 1  # rank 0's
        return inputs, targets

    model, reference = wrap(module, scheme=scheme)
    digests = []
    for step in range(4):
        inputs, targets = batch(step)
        model.zero_grad()
        reference.zero_grad()
        mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
        for part in zip(inputs.chunk(poseidon.world_size()), targets.chunk(poseidon.world_size()), strict=True):
            (mean_loss(reference, *part) / poseidon.world_size()).backward()
        assert_gradients_close(model.module, reference)
        digests.append(digest(p.grad for p in model.parameters()))
    return " ".join(digests)


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_one_rank_dense_and_others_factors(scheme: str) -> None:
    assert all_equal(workers.run(3, some_rank_uses_the_weight_outside, scheme))


def register(kind: str, weight: Any, node: Any, seen: list[torch.Tensor]) -> None:
    """A hook of this kind, which notes the gradient. Those that come before `.grad` is written double it."""
    if kind == "post_accumulate":
        weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    elif kind == "tensor":
        weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
    elif kind == "node after":
        node.register_hook(lambda *_: seen.append(weight.grad.clone()))
    else:
        node.register_prehook(lambda grads: (seen.append(grads[0].clone()), (grads[0] * 2,))[1])


def hooked(scheme: str, kind: str, wrapped_before: bool) -> str:
    module = OneLinear()
    seen: list[torch.Tensor] = []
    weight = module.inner.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node  # has hooks only as long as somebody holds it
    if not wrapped_before:
        register(kind, weight, node, seen)
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    if wrapped_before:
        register(kind, weight, node, seen)
    plain = OneLinear()
    for step in range(3):
        inputs, targets = map(own_rows, rows_batch(step))
        model.zero_grad()
        plain.zero_grad()
        mean_loss(model, inputs, targets).backward()
        mean_loss(plain, inputs, targets).backward()
        torch.testing.assert_close(seen[-1], plain.inner.weight.grad)
        mean = plain.inner.weight.grad * (2 if kind in ("tensor", "node before") else 1)
        total = [torch.empty_like(mean) for _ in range(poseidon.world_size())]
        for rank in range(poseidon.world_size()):
            total[rank].copy_(mean)
            poseidon.broadcast(total[rank], root=rank)
        torch.testing.assert_close(weight.grad, torch.stack(total).mean(0))
    assert len(seen) == 3
    return digest(p.grad for p in module.parameters())


KINDS_OF_HOOKS = [("tensor", False), ("post_accumulate", False), ("node after", False), ("node before", True)]


@pytest.mark.parametrize(("kind", "wrapped_before"), KINDS_OF_HOOKS)
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_hooks_see_the_local_gradient(scheme: str, kind: str, wrapped_before: bool) -> None:
    assert all_equal(workers.run(2, hooked, scheme, kind, wrapped_before))


def hook_for_a_while() -> list[bool]:
    """Whether factors are sent. What a dropped wrapper has left at a node is nobody's hook, and a hook may go again."""
    module = OneLinear()
    node = torch.autograd.graph.get_gradient_edge(module.inner.weight).node
    poseidon.DistributedDataParallel(module, scheme="sfb")
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    sent = []
    for step in range(3):
        model.zero_grad()
        handle = node.register_prehook(lambda grads: None) if step == 1 else None
        mean_loss(model, *map(own_rows, rows_batch(step))).backward()
        if handle is not None:
            handle.remove()
        stats = {layer.name: layer.factor_count for layer in model.synchronization_stats()}
        sent.append(stats["inner.weight"] == 4 * poseidon.world_size())
    return sent


def test_a_hook_at_a_node_makes_a_gradient_dense_while_it_is_there() -> None:
    assert workers.run(2, hook_for_a_while) == [[True, False, True]] * 2


class PartlyUsed(nn.Module):
    """Which branch runs depends on the flag in the input's first element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left = nn.Linear(SIZE, SIZE)
        self.right = nn.Linear(SIZE, SIZE)
        self.never = nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.left(x) if x[0, 0] > 0 else self.right(x)))


def unused(scheme: str) -> str:
    model, reference = wrap(PartlyUsed(), scheme=scheme)
    size = poseidon.world_size()
    digests = []
    # By step, which ranks take the left branch: some, all, none.
    for step, left_ranks in enumerate([{0}, {0, 1, 2}, set(), {1}]):
        inputs, targets = mlp_batch(step, 4 * size)
        for rank, part in enumerate(inputs.chunk(size)):
            part[0, 0] = 1.0 if rank in left_ranks else -1.0
        model.zero_grad()
        reference.zero_grad()
        mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
        for part in zip(inputs.chunk(size), targets.chunk(size), strict=True):
            (mean_loss(reference, *part) / size).backward()
        assert model.module.never.weight.grad is None
        assert_gradients_close(model.module, reference)
        digests.append(digest(p.grad for p in model.parameters() if p.grad is not None))
    return " ".join(digests)


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_unused_parameters(scheme: str) -> None:
    assert all_equal(workers.run(3, unused, scheme))


def backward_twice(scheme: str, zero_between: str) -> str:
    """Two synchronizing backward passes into the same gradients, without no_sync()."""
    model, reference = wrap(mlp(), scheme=scheme)
    digests = []
    for step in range(3):
        if zero_between == "none":
            model.zero_grad()
            reference.zero_grad()
        elif zero_between == "zeros":
            for part in (model, reference):
                part.zero_grad(set_to_none=False)
        for half in range(2):
            inputs, targets = mlp_batch(10 * step + half, 4 * poseidon.world_size())
            mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
            mean_loss(reference, inputs, targets).backward()
        assert_gradients_close(model.module, reference)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        digests.append(digest(p.grad for p in model.parameters()))
    return " ".join(digests)


@pytest.mark.parametrize("zero_between", ["none", "zeros", "never"])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_backward_twice(scheme: str, zero_between: str) -> None:
    assert all_equal(workers.run(2, backward_twice, scheme, zero_between))


def two_models(scheme: str) -> str:
    """One backward through two wrapped models, one of which has unused parameters."""
    first, first_reference = wrap(PartlyUsed(), scheme=scheme)
    second, second_reference = wrap(nn.Sequential(nn.Linear(4, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, 4)))
    digests = []
    for step in range(3):
        inputs, targets = rows_batch(step)
        inputs[:, 0] = 1.0
        for part in (first, second, first_reference, second_reference):
            part.zero_grad()
        F.mse_loss(second(first(own_rows(inputs))), own_rows(targets)).backward()
        F.mse_loss(second_reference(first_reference(inputs)), targets).backward()
        assert_gradients_close(first.module, first_reference)
        assert_gradients_close(second.module, second_reference)
        digests.append(digest(p.grad for part in (first, second) for p in part.parameters() if p.grad is not None))
    return " ".join(digests)


@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_two_models_in_one_backward(scheme: str) -> None:
    assert all_equal(workers.run(2, two_models, scheme))


def compiled() -> str:
    module = mlp()
    model, reference = wrap(module, scheme="auto")
    faster = torch.compile(model, backend="aot_eager")
    for step in range(2):
        inputs, targets = rows_batch(step)
        model.zero_grad()
        reference.zero_grad()
        mean_loss(faster, own_rows(inputs), own_rows(targets)).backward()
        mean_loss(reference, inputs, targets).backward()
        assert_gradients_close(module, reference)
    return digest(p.grad for p in module.parameters())


def test_compiled() -> None:
    assert all_equal(workers.run(2, compiled))


def autocast(scheme: str, outside: bool) -> str:
    model, reference = wrap(UsedOutsideUnderAutocast() if outside else mlp(), scheme=scheme)
    inputs, targets = mlp_batch(0, 4 * poseidon.world_size())
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = mean_loss(model, own_rows(inputs), own_rows(targets))
            theirs = mean_loss(reference, inputs, targets)
        ours.backward()
        theirs.backward()
        assert_gradients_close(model.module, reference, tolerance=3e-2)
    return digest(p.grad for p in model.parameters())


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_autocast(scheme: str, outside: bool) -> None:
    assert all_equal(workers.run(2, autocast, scheme, outside))


def gradients_on_request() -> list[bool]:
    """torch.autograd.grad and backward(inputs=...) must not exchange, or lose, anything."""
    module = OneLinear()
    plain = copy.deepcopy(module)
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    inputs, targets = map(own_rows, rows_batch(0))
    mean_loss(model, inputs, targets).backward()
    before = [p.grad.clone() for p in module.parameters()]
    asked = [module.inner.weight, module.out.bias]
    wanted = [plain.inner.weight, plain.out.bias]
    equal = [
        torch.allclose(a, b)
        for a, b in zip(
            torch.autograd.grad(mean_loss(model, inputs, targets), asked),
            torch.autograd.grad(mean_loss(plain, inputs, targets), wanted),
            strict=True,
        )
    ]
    x, y = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    equal.append(
        torch.allclose(
            torch.autograd.grad(mean_loss(model, x, targets), x)[0],
            torch.autograd.grad(mean_loss(plain, y, targets), y)[0],
        )
    )
    equal += [torch.equal(p.grad, b) for p, b in zip(module.parameters(), before, strict=True)]
    return equal


def test_gradients_on_request_are_local() -> None:
    for answer in workers.run(2, gradients_on_request):
        assert all(answer)


def gradient_penalty() -> str:
    """Double backward through a captured layer: the penalty's gradient is exact and exchanged."""

    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        first = F.mse_loss(model(inputs), targets)
        (slope,) = torch.autograd.grad(first, inputs, create_graph=True)
        return first + slope.square().sum() * inputs.shape[0]

    return compare_gradients(mlp(), rows_batch, loss, scheme="auto")[0]


def test_gradient_penalty() -> None:
    assert all_equal(workers.run(2, gradient_penalty))


def backward_fails(folder: Path) -> list[str]:
    model = poseidon.DistributedDataParallel(mlp(), scheme="auto")
    inputs, targets = map(own_rows, rows_batch(0))
    meet(folder, poseidon.rank(), 2)  # or the other one would hear of the failure in its constructor
    hidden = model.module[0].register_full_backward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError, poseidon.PoseidonError):  # the other rank may be first
        mean_loss(model, inputs, targets).backward()
    hidden.remove()
    texts = []
    for _ in range(2):
        with pytest.raises(poseidon.PoseidonError) as caught:
            mean_loss(model, inputs, targets).backward()
        texts.append(str(caught.value))
    return texts


def _initialized(function: Callable[..., list[str]], *args: Any) -> list[str]:
    poseidon.init()
    return function(*args)


def test_a_backward_that_fails_midway_is_not_silently_repeated(tmp_path: Path) -> None:
    for texts in workers.run_fresh(2, _initialized, backward_fails, tmp_path):
        assert not isinstance(texts, workers.Failure), texts
        assert all("earlier backward pass failed" in text for text in texts), texts
