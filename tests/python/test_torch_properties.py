"""Random models, worker counts, batches, chunk sizes: always one process's result, always the same bits."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import poseidon.torch as poseidon
import workers
from torch_cases import EXACT_SCHEMES, all_equal, assert_close, parameters_digest


@dataclass(frozen=True)
class Case:
    """One random training run."""

    widths: tuple[int, ...]
    convolution: bool
    bias: bool
    scheme: str
    rows: tuple[tuple[int, ...], ...]  # by step, by rank
    micro_batches: int
    set_to_none: bool
    schedule: str
    chunk_bytes: int
    group_bytes: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        size = 36
        if self.convolution:
            layers += [nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Tanh()]
            size = 4 * 36
        for width in self.widths:
            layers += [nn.Linear(size, width, bias=self.bias), nn.Tanh()]
            size = width
        return nn.Sequential(*layers).double()


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    world_size = draw(st.integers(1, 8))
    counts = st.one_of(st.integers(0, 4), st.integers(0, 40))
    rows = draw(st.lists(st.lists(counts, min_size=world_size, max_size=world_size).map(tuple), min_size=1, max_size=3))
    case = Case(
        widths=tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))),
        convolution=draw(st.booleans()),
        bias=draw(st.booleans()),
        scheme=draw(st.sampled_from(["auto", *EXACT_SCHEMES])),
        rows=tuple(rows),
        micro_batches=draw(st.integers(1, 2)),
        set_to_none=draw(st.booleans()),
        schedule=draw(st.sampled_from(["wait_free", "sequential"])),
        chunk_bytes=draw(st.sampled_from([64, 1000, 1 << 21])),
        group_bytes=draw(st.sampled_from([1, 3000, 1 << 18])),
    )
    return world_size, case


def train(case: Case) -> str:
    module = case.build()
    reference = copy.deepcopy(module)
    model = poseidon.DistributedDataParallel(module, scheme=case.scheme)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5) for part in (module, reference)]
    for step, rows in enumerate(case.rows):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(sum(rows), 36, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        own = inputs.split(rows)[poseidon.rank()].tensor_split(case.micro_batches)
        for index, part in enumerate(own):
            with contextlib.nullcontext() if index == len(own) - 1 else model.no_sync():
                result = model(part)
                F.mse_loss(result, torch.ones_like(result), reduction="sum").backward()
        result = reference(inputs)
        (F.mse_loss(result, torch.ones_like(result), reduction="sum") / len(rows)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_close(module, reference)
    return parameters_digest(module)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_training_equals_one_process(drawn: tuple[int, Case]) -> None:
    world_size, case = drawn
    options = {"chunk_bytes": case.chunk_bytes, "small_bytes": 500, "group_bytes": case.group_bytes}
    assert all_equal(workers.run(world_size, train, case, schedule=case.schedule, **options))
