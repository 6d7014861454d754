"""Wire formats: gradients are rounded once on the way to the sum and once on the way back, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import all_equal, digest, mlp, mlp_batch, parameters_digest

RANKS = 3
BLOCK = 256


class Model(nn.Module):
    """A factorable layer, a large vector whose last block is not full, and small parameters that travel in a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(300, 211)
        self.last = nn.Linear(211, 5)
        self.curve = nn.Parameter(torch.randn(50_003))
        self.small = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.last(torch.relu(self.first(x))).sum() + (self.small**2).sum() * x.mean()
        return value + (self.curve * x.sum()).sin().sum()


def gradients_of(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """What this rank alone would have."""
    model.zero_grad()
    model(inputs_of(rank)).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(rank))


def rounded(tensor: torch.Tensor, wire: str) -> torch.Tensor:
    """The values as they arrive in that format."""
    if wire in ("bf16", "fp16"):
        return tensor.to({"bf16": torch.bfloat16, "fp16": torch.float16}[wire]).float()
    if wire == "fp32":
        return tensor
    blocks = torch.cat([tensor.flatten(), torch.zeros(-tensor.numel() % BLOCK)]).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    # Not 127 / largest, which torch computes as a reciprocal and a product: two roundings instead of one.
    levels = torch.full_like(largest, 127)
    steps = torch.round(blocks * torch.where(largest > 0, levels / largest, 0))
    return (steps * (largest / 127)).flatten()[: tensor.numel()].view_as(tensor)


def exchange_once(wire: str) -> tuple[list[bool], str]:
    """Which gradients have the very bits of a sum in rank order, and a digest of all of them."""
    module = Model()
    all_gradients = [gradients_of(module, rank) for rank in range(RANKS)]
    module.zero_grad()
    model = poseidon.DistributedDataParallel(module, wire=wire, scheme="ps")
    model(inputs_of(poseidon.rank())).backward()
    same = []
    for index, param in enumerate(module.parameters()):
        grouped = param.numel() * 4 <= 32 << 10
        used = "bf16" if wire == "int8" and grouped else wire
        total = rounded(all_gradients[0][index], used)
        for gradients in all_gradients[1:]:
            total = total + rounded(gradients[index], used)
        assert param.grad is not None
        same.append(torch.equal(param.grad, rounded(total / RANKS, used)))
    return same, digest(param.grad for param in module.parameters() if param.grad is not None)


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
def test_dense_gradients_have_the_bits_of_one_rounding_each_way(wire: str) -> None:
    answers = workers.run(RANKS, exchange_once, wire, small_bytes=32 << 10)
    assert all(all(same) for same, _ in answers), answers
    assert all_equal([bits for _, bits in answers])


def train(wire: str, scheme: str, overlapped: bool) -> tuple[str, float]:
    module = mlp()
    model = poseidon.DistributedDataParallel(module, wire=wire, scheme=scheme)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if overlapped:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    for step in range(6):
        inputs, targets = (part.chunk(RANKS)[poseidon.rank()] for part in mlp_batch(step, 6 * RANKS))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if overlapped:
        model(inputs)  # waits for the last step
    reference = mlp()
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(6):
        inputs, targets = mlp_batch(step, 6 * RANKS)
        plain.zero_grad()
        torch.nn.functional.mse_loss(reference(inputs), targets).backward()
        plain.step()
    distance = max((a - b).abs().max().item() for a, b in zip(module.parameters(), reference.parameters(), strict=True))
    return parameters_digest(module), distance


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("scheme", ["ps", "sfb", "sharded_factors", "auto"])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_replicas_stay_equal_and_near_fp32(wire: str, scheme: str, overlapped: bool) -> None:
    answers = workers.run(RANKS, train, wire, scheme, overlapped)
    assert all_equal([bits for bits, _ in answers])
    assert 0 < answers[0][1] < 5e-3  # it is rounded, and little


def exchange_bad_values(wire: str, bad: float) -> list[bool]:
    module = nn.Linear(600, 30)
    model = poseidon.DistributedDataParallel(module, wire=wire, scheme="ps")
    model(torch.ones(2, 600)).sum().backward(torch.tensor(1.0))
    assert module.weight.grad is not None
    assert module.weight.grad.isfinite().all()
    model.zero_grad()
    scale = bad if poseidon.rank() == 1 else 1.0
    (model(torch.ones(2, 600))[:, :1] * scale).sum().backward()
    return [bool(module.weight.grad[0].isfinite().any()), bool(module.weight.grad[20].isfinite().all())]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_infinity_and_nan_reach_every_rank(wire: str, bad: float) -> None:
    for some_finite, others_finite in workers.run(RANKS, exchange_bad_values, wire, bad):
        assert not some_finite  # a GradScaler of any rank sees it
        assert others_finite


def plan_of(wire: str | dict[str, str]) -> list[tuple[str, str, float]]:
    model = poseidon.DistributedDataParallel(Model(), wire=wire, scheme="ps")
    return [(row.layer, row.wire, row.bytes / row.dense_bytes) for row in model.plan()]


def test_plan_shows_the_format_and_its_bytes() -> None:
    table = workers.run(2, plan_of, {"first": "int8", "*": "bf16"})[0]
    rows = {name: (wire, share) for name, wire, share in table}
    assert rows["first.weight"] == ("int8", pytest.approx(260 / 1024))
    assert rows["curve"] == ("bf16", 0.5)


def refusal(wire: str | dict[str, str], dtype: torch.dtype, scheme: str) -> str:
    try:
        poseidon.DistributedDataParallel(Model().to(dtype), wire=wire, scheme=scheme)
    except InvalidArgument as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("wire", "dtype", "scheme", "said"),
    [
        ("bf32", torch.float32, "auto", "no wire format: known are fp32, bf16, fp16, int8"),
        ({"nothing": "bf16"}, torch.float32, "auto", "no parameter or module is called 'nothing'"),
        ("bf16", torch.float64, "auto", "which only float32 gradients can take: use wire fp32 for it"),
        ("int8", torch.float32, "project_adam", "which sends numbers as they are"),
    ],
)
def test_what_has_no_meaning_is_refused(wire: str | dict[str, str], dtype: torch.dtype, scheme: str, said: str) -> None:
    for answer in workers.run(2, refusal, wire, dtype, scheme):
        assert said in answer


def disagree() -> str:
    poseidon.init()
    try:
        poseidon.DistributedDataParallel(Model(), wire=("bf16", "fp16")[poseidon.rank()])
    except poseidon.PoseidonError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def test_ranks_that_disagree_are_told() -> None:
    for answer in workers.run_fresh(2, disagree):
        assert answer.startswith("Mismatch")
        assert "wire bf16" in answer
        assert "wire fp16" in answer


def exchange_alone() -> bool:
    module = Model()
    expected = gradients_of(module, 0)
    module.zero_grad()
    model = poseidon.DistributedDataParallel(module, wire="int8")
    model(inputs_of(0)).backward()
    return all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True) if p.grad is not None)


def test_one_worker_rounds_nothing() -> None:
    assert workers.run(1, exchange_alone) == [True]
