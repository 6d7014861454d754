"""Small parameters are handed over in groups: the same bits as one by one, and every write to them is seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import PoseidonError
from torch_cases import all_equal

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
