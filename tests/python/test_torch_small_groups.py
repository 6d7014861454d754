"""Small parameters are handed over in groups: the same bits as one by one, and every write to them is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from torch_cases import all_equal
from waiting import meet

COUNT = 40


class Many(nn.Module):
    """Many small parameters of several shapes and dtypes; not all are used in every pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [(8,), (2, 3), (1,), (3, 1, 2)]
        kinds = [torch.float32, torch.float32, torch.float64]
        self.parts = nn.ParameterList(
            nn.Parameter(torch.rand(shapes[i % 4], dtype=kinds[i // 14])) for i in range(COUNT)
        )

    def forward(self, x: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        used = [part for i, part in enumerate(self.parts) if i != left_out]
        return torch.stack([(part * x).sin().sum().float() for part in used]).sum()


def trained(wrap: bool, accumulate: bool = False) -> list[torch.Tensor]:
    module = Many()
    model: Any = poseidon.DistributedDataParallel(module) if wrap else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    ranks = [poseidon.rank()] if wrap else list(range(poseidon.world_size()))
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for rank in ranks:
            if wrap and accumulate:
                with model.no_sync():
                    model(torch.tensor(1.0 + rank)).backward()
            left_out = 3 if step == 2 else -1
            (model(torch.tensor(0.5 * step + rank), left_out) / (1 if wrap else len(ranks))).backward()
        optimizer.step()
    return [param.detach() for param in module.parameters()]


def values(wrap: bool, accumulate: bool = False) -> list[float]:
    return [float(value) for param in trained(wrap, accumulate) for value in param.flatten()]


def beside_one_process() -> tuple[list[float], list[float]]:
    return values(True), values(False)


def test_groups_train_as_one_process() -> None:
    (ours, alone), other = workers.run(2, beside_one_process)
    assert ours == other[0]
    assert ours == pytest.approx(alone, rel=1e-5, abs=1e-5)


class Conjugated(Many):
    """Each parameter is an imaginary part. By `conj()` every other gradient is a negative view."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        terms = []
        for i, part in enumerate(self.parts):
            number = torch.complex(torch.ones_like(part), part)
            weight = torch.full_like(number, complex(3, i + float(x)))
            by_view = self.views and i % 2 == 0
            terms.append((number.conj() * weight if by_view else number * weight.conj()).real.sum().float())
        return torch.stack(terms).sum()


def gradients_of(views: bool) -> list[float]:
    alone, module = Conjugated(views), Conjugated(views)
    alone(torch.tensor(1.0)).backward()
    assert any(param.grad.is_neg() for param in alone.parts) == views  # type: ignore[union-attr]
    model = poseidon.DistributedDataParallel(module)
    for _ in range(2):
        module.zero_grad()
        model(torch.tensor(0.5 + poseidon.rank())).backward()
    return [float(value) for param in module.parts for value in param.grad.flatten()]  # type: ignore[union-attr]


def beside_plain_memory(only_rank: int | None) -> tuple[list[float], list[float]]:
    return gradients_of(views=only_rank in (None, poseidon.rank())), gradients_of(views=False)


@pytest.mark.parametrize("only_rank", [None, 1])
def test_negative_views_are_exchanged_as_what_they_show(only_rank: int | None) -> None:
    for views, plain in workers.run(2, beside_plain_memory, only_rank):
        assert views == plain
        assert plain[:8] == [1.0] * 8  # the mean of 0.5 and 1.5, plus the parameter's number


def told() -> int:
    """How many of the parameters' hooks do more than count, in one backward pass."""
    model = poseidon.DistributedDataParallel(Many())
    sync: Any = model.synchronizer
    tell, found = sync.after_accumulation, []

    def listen(entry: Any) -> None:
        found.append(entry)
        tell(entry)

    sync.after_accumulation = listen
    model(torch.tensor(1.0)).backward()
    return len(found)


def test_hooks_only_count() -> None:
    groups = 2  # one for each dtype
    assert workers.run(2, told) == [groups + 1, groups + 1]  # the first one begins the exchange


class Nested(Many):
    """Inner backward passes reach all parameters, twice, or once beside the outer one."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside = outside

    def forward(self, x: torch.Tensor, left_out: int = -1) -> torch.Tensor:
        def inner(value: torch.Tensor) -> torch.Tensor:
            return super(Nested, self).forward(value, left_out)

        x = x.requires_grad_()
        again = inner(x.sin()) if self.outside else checkpoint(inner, x.sin(), use_reentrant=True)
        return checkpoint(inner, (again * x if self.outside else x.cos()), use_reentrant=True) + again


def nested(outside: bool) -> tuple[list[float], list[float]]:
    found = []
    for wrap in (True, False):
        module = Nested(outside)
        model: Any = poseidon.DistributedDataParallel(module, static_graph=outside) if wrap else module
        for step in range(4):
            module.zero_grad()
            for rank in [poseidon.rank()] if wrap else range(poseidon.world_size()):
                (model(torch.tensor(0.5 * step + rank)) / (1 if wrap else poseidon.world_size())).backward()
        found.append([float(value) for param in module.parameters() for value in param.grad.flatten()])
    return found[0], found[1]


@pytest.mark.parametrize("outside", [False, True])
def test_groups_wait_for_nested_backward_passes(outside: bool) -> None:
    (ours, alone), other = workers.run(2, nested, outside)
    assert ours == other[0]
    assert ours == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_groups_take_accumulated_gradients() -> None:
    assert all_equal(workers.run(2, values, True, True))


def written(how: str) -> str:
    poseidon.init()
    module = Many()
    model = poseidon.DistributedDataParallel(module)
    part = module.parts[13]

    def write() -> None:  # at the end of backward, with all exchanges under way
        assert part.grad is not None
        if how == "numpy":
            part.grad.numpy()[...] *= 2
        elif how == "data":
            part.grad.data.mul_(2)
        elif how == "replaced":
            part.grad = 2 * part.grad

    assert model.synchronizer is not None
    model.synchronizer.before_results = write
    try:
        model(torch.tensor(1.0)).backward()
    except PoseidonError as error:
        return str(error)
    return ""


HOW_TO_SAY_IT = {
    "numpy": "parts.13 was changed in place while it was exchanged",
    "data": "parts.13 was changed in place while it was exchanged",
    "replaced": "parts.13 was replaced while it was exchanged",
    "not": "",
}


@pytest.mark.parametrize("how", HOW_TO_SAY_IT)
def test_a_write_that_no_version_counter_sees_is_an_error(how: str) -> None:
    for said in workers.run_fresh(2, written, how):
        assert HOW_TO_SAY_IT[how] in said
        assert bool(said) == (how != "not"), said


class _Again(torch.autograd.Function):
    """Its backward runs another one, which reaches a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Many) -> torch.Tensor:
        ctx.part = module.parts[7]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.part.float().sum().backward()
        return grad, None


def reached_again(folder: Path) -> list[str]:
    poseidon.init()
    module = Many()
    model = poseidon.DistributedDataParallel(module)
    said = []
    for _ in range(2):
        try:
            model(_Again.apply(torch.tensor(1.0, requires_grad=True), module)).backward()
            said.append("")
        except PoseidonError as error:
            said.append(str(error))
            meet(folder, poseidon.rank(), 2)  # this one ends the job next, and the other one would hear of that first
    return said


def test_a_gradient_that_comes_after_the_start_is_an_error(tmp_path: Path) -> None:
    for first, second in workers.run_fresh(2, reached_again, tmp_path):
        assert "parts.7 received a gradient twice in one backward pass" in first
        assert "an earlier backward pass failed" in second


def heard() -> list[set[bool]]:
    """Whether parameters hear of gradients before these are accumulated, one set for each kind of model."""

    def of(model: Any) -> set[bool]:
        return {entry.hears_before for entry in model.synced_parameters}

    plain = poseidon.DistributedDataParallel(Many())
    found = [of(plain)]
    worker = poseidon.DistributedDataParallel(Many())
    optimizer = poseidon.DistributedOptimizer(torch.optim.SGD(worker.parameters(), lr=0.1), worker)
    server = poseidon.DistributedDataParallel(Many())
    stored = poseidon.DistributedOptimizer(torch.optim.SGD(server.parameters(), lr=0.1), server, update="server")
    found += [of(worker), of(server)]
    outer = poseidon.DistributedDataParallel(nn.ModuleList([plain.module, nn.Linear(1, 1)]))
    found += [of(plain), {outer.synced_parameters[0].hears_before}]
    again = poseidon.DistributedDataParallel(worker.module)
    found += [of(again)]
    large = poseidon.DistributedDataParallel(nn.Linear(512, 512))
    found += [of(large)]
    del optimizer, stored
    return found


def test_only_what_may_be_under_way_hears_of_gradients_before() -> None:
    kinds = [{False}, {True}, {True}, {True}, {True}, {False}, {True}]
    assert workers.run(2, heard) == [kinds, kinds]


def used_again_with_a_frozen_parameter() -> str:
    poseidon.init()
    module = Many()
    first, _ = poseidon.DistributedDataParallel(module), poseidon.DistributedDataParallel(module)
    module.parts[3].requires_grad_(False)
    with pytest.raises(InvalidArgument) as caught:
        first(torch.tensor(1.0))
    return str(caught.value)


def test_a_wrapper_that_is_used_again_names_a_parameter_that_was_frozen() -> None:
    for said in workers.run_fresh(2, used_again_with_a_frozen_parameter):
        assert "parameter parts.3 required a gradient when the module was wrapped" in said
