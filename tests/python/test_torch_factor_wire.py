"""The format of factors, apart from that of dense gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import digest

RANKS = 3


class Model(nn.Module):
    """A layer that may travel as factors, and a vector that travels dense; neither is small enough for a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(200, 100)
        self.curve = nn.Parameter(torch.randn(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = (self.layer(x) ** 2).sum() + (self.curve * x.sum()).sin().sum()
        return value


def gradients(scheme: str) -> tuple[str, str]:
    """The bits of the layer's gradient and of the vector's."""
    model = Model()
    wrapped = poseidon.DistributedDataParallel(model, scheme={"layer": scheme, "*": "ps"})
    wrapped(torch.randn(4, 200, generator=torch.Generator().manual_seed(poseidon.rank()))).backward()
    assert model.layer.weight.grad is not None
    assert model.curve.grad is not None
    return digest([model.layer.weight.grad]), digest([model.curve.grad])


def bits(scheme: str, wire: str, factor_wire: str) -> tuple[str, str]:
    answers = workers.run(RANKS, gradients, scheme, wire=wire, factor_wire=factor_wire, small_bytes=4096)
    assert len(set(answers)) == 1, "replicas differ"
    found: tuple[str, str] = answers[0]
    return found


@pytest.mark.parametrize("scheme", ["sfb", "sharded_factors"])
def test_factors_and_dense_gradients_have_formats_of_their_own(scheme: str) -> None:
    exact = bits(scheme, "fp32", "wire")
    rounded = bits(scheme, "bf16", "wire")
    assert exact[0] != rounded[0]
    assert exact[1] != rounded[1]
    assert bits(scheme, "bf16", "fp32") == (exact[0], rounded[1])
    assert bits(scheme, "fp32", "bf16") == (rounded[0], exact[1])
    assert bits(scheme, "int8", "wire")[0] == rounded[0]  # 8 bits are too few for factors


def plan_of(scheme: str) -> dict[str, tuple[str, float]]:
    model = poseidon.DistributedDataParallel(Model(), scheme={"layer": scheme, "*": "ps"})
    model(torch.randn(4, 200)).backward()
    return {row.layer: (row.wire, row.bytes) for row in model.plan()}


def test_the_plan_shows_the_format_that_travels() -> None:
    half, whole, coarse = (
        workers.run(2, plan_of, "sfb", wire=wire, factor_wire=factor_wire, small_bytes=4096)[0]
        for wire, factor_wire in [("fp32", "fp16"), ("fp16", "fp32"), ("int8", "wire")]
    )
    assert (half["layer.weight"][0], half["curve"][0]) == ("fp16", "fp32")
    assert (whole["layer.weight"][0], whole["curve"][0]) == ("fp32", "fp16")
    assert (coarse["layer.weight"][0], coarse["curve"][0]) == ("bf16", "int8")
    assert half["layer.weight"][1] * 2 == whole["layer.weight"][1]


def plan_without_rounding() -> set[str]:
    """The formats of layers that travel in groups, and of numbers that have 16 bits anyway."""
    model = poseidon.DistributedDataParallel(
        nn.Sequential(nn.Linear(9, 9), nn.Linear(200, 100).half()).requires_grad_()
    )
    return {row.wire for row in model.plan()}


def test_the_plan_shows_what_does_not_take_the_format() -> None:
    options = {"wire": "bf16", "factor_wire": "bf16", "error_feedback": "on", "small_bytes": 4096}
    assert workers.run(2, plan_without_rounding, **options)[0] == {"fp32"}


def lossy_gradient(scheme: str) -> str:
    poseidon_model = poseidon.DistributedDataParallel(nn.Linear(200, 100), lossy=scheme)
    for _ in range(3):
        poseidon_model(torch.randn(300, 200, generator=torch.Generator().manual_seed(poseidon.rank()))).sum().backward()
    assert {row.scheme for row in poseidon_model.plan() if row.layer == "weight"} == {scheme}
    return digest(param.grad for param in poseidon_model.parameters() if param.grad is not None)


@pytest.mark.parametrize("scheme", ["topk", "onebit", "powersgd"])
def test_lossy_schemes_do_not_take_the_format_of_factors(scheme: str) -> None:
    answers = workers.run(2, lossy_gradient, scheme, factor_wire="bf16", small_bytes=4096)
    assert answers[0] == answers[1]


def refusal(dtype: torch.dtype, scheme: str) -> str:
    try:
        poseidon.DistributedDataParallel(Model().to(dtype), scheme={"layer": scheme, "*": "ps"})
    except InvalidArgument as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("dtype", "scheme", "said"),
    [
        (torch.float64, "sfb", "and factor_wire bf16, which only float32 gradients can take: use scheme ps for it"),
        (torch.float32, "project_adam", "which sends numbers as they are, and factor_wire bf16"),
    ],
)
def test_what_has_no_meaning_is_refused(dtype: torch.dtype, scheme: str, said: str) -> None:
    for answer in workers.run(2, refusal, dtype, scheme, factor_wire="bf16"):
        assert said in answer
