"""Lossy schemes: replicas stay equal, what is not sent stays on its worker, and nothing is lost in silence."""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.schemes import SCHEMES
from torch_cases import all_equal, digest, mlp, mlp_batch, own_rows, parameters_digest

RANKS = 3
LOSSY = [name for name, scheme in SCHEMES.items() if scheme.lossy]


class Model(nn.Module):
    """A factorable layer, a convolution, a large vector, and small parameters that travel in a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(300, 211)
        self.convolution = nn.Conv2d(8, 40, 5)
        self.curve = nn.Parameter(torch.randn(50_003))
        self.small = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x[:, :288].reshape(-1, 8, 6, 6)
        value: torch.Tensor = torch.relu(self.first(x)).sum() + self.convolution(images).tanh().sum()
        return value + (self.curve * x.sum()).sin().sum() + (self.small**2).sum() * x.mean()


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 300, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients_of(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    """What this rank alone would have."""
    model.zero_grad()
    model(inputs_of(rank, step)).backward()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return gradients


def topk_part(gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """What a rank sends with topk_fraction=0.05, as a dense tensor; changes the residual."""
    wanted = (gradient + residual).flatten()
    count = -(-wanted.numel() * 5 // 100)
    kept = wanted.abs().sort(descending=True, stable=True).indices[:count]
    part = torch.zeros_like(wanted)
    part[kept] = wanted[kept]
    residual.copy_((wanted - part).view_as(residual))
    return part.view_as(gradient)


def onebit_part(gradient: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The mean of its sign for each element of a block of 512, added in 16 lanes."""
    wanted = (gradient + residual).flatten()
    # All blocks at once. What fills up the last one adds zeros, and does not count.
    missing = -wanted.numel() % 512
    blocks = torch.cat([wanted, torch.zeros(missing)]).view(-1, 512)
    is_there = torch.cat([torch.ones_like(wanted), torch.zeros(missing)]).view(-1, 512).bool()
    parts = torch.empty_like(blocks)
    for negative in (True, False):
        sign = (blocks < 0) == negative
        lanes = torch.zeros(len(blocks), 16)
        for row in torch.where(sign, blocks, 0.0).view(-1, 32, 16).unbind(1):
            lanes = lanes + row
        total = torch.zeros(len(blocks))
        for lane in lanes.unbind(1):
            total = total + lane
        mean = total / (sign & is_there).sum(1).clamp(min=1)
        parts = torch.where(sign, mean[:, None], parts)
    part = parts.view(-1)[: wanted.numel()]
    residual.copy_((wanted - part).view_as(residual))
    return part.view_as(gradient)


PARTS = {"topk": topk_part, "onebit": onebit_part}


def exchange(scheme: str) -> tuple[list[bool], str]:
    """Which gradients have the bits of a slow computation in every step, and a digest of all of them."""
    module = Model()
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    params = list(module.parameters())
    residuals = [[torch.zeros_like(param) for param in params] for _ in range(RANKS)]
    same = [True] * len(params)
    seen = []
    for step in range(4):
        all_gradients = [gradients_of(module, rank, step) for rank in range(RANKS)]
        model.zero_grad()
        model(inputs_of(poseidon.rank(), step)).backward()
        for index, param in enumerate(params):
            compressed = param.numel() * 4 > 32 << 10
            total = torch.zeros_like(param)
            for gradients, kept in zip(all_gradients, residuals, strict=True):
                one = gradients[index]
                total += PARTS[scheme](one, kept[index]) if compressed else one
            assert param.grad is not None
            same[index] &= torch.equal(param.grad, total / RANKS)
            seen.append(param.grad.clone())
    return same, digest(seen)


@pytest.mark.parametrize("scheme", PARTS)
def test_gradients_have_the_bits_of_a_slow_computation(scheme: str) -> None:
    answers = workers.run(RANKS, exchange, scheme, small_bytes=32 << 10, topk_fraction=0.05)
    assert all(all(same) for same, _ in answers), answers
    assert all_equal([bits for _, bits in answers])


def train(scheme: str, overlapped: bool, steps: int = 60) -> tuple[str, list[float]]:
    module = mlp()
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if overlapped:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    losses = []
    for _ in range(steps):
        inputs, targets = map(own_rows, mlp_batch(0, 8 * RANKS))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if overlapped:
        model(inputs)  # waits for the last step
    return parameters_digest(module), losses


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("scheme", LOSSY)
def test_the_loss_falls_and_replicas_stay_equal(scheme: str, overlapped: bool) -> None:
    answers = workers.run(RANKS, train, scheme, overlapped, small_bytes=1000, topk_fraction=0.05)
    assert all_equal([bits for bits, _ in answers])
    exact = workers.run(RANKS, train, "ps", overlapped)
    for (_, losses), (_, references) in zip(answers, exact, strict=True):
        assert losses != references  # something is lost
        assert losses[-1] < 0.5 * losses[0]
        assert losses[-1] < references[-1] + 0.3 * losses[0]


def accumulate(scheme: str, at_once: bool) -> list[torch.Tensor]:
    """Gradients of two batches, in one backward or in two of which the second exchanges, in several steps."""
    module = mlp(torch.float32)
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    grads = []
    for step in range(3):
        inputs, targets = map(own_rows, mlp_batch(step, 8 * RANKS))
        model.zero_grad()
        if at_once:
            (2 * nn.functional.mse_loss(model(inputs), targets)).backward()
        else:
            with model.no_sync():
                nn.functional.mse_loss(model(inputs[:4]), targets[:4]).backward()
            nn.functional.mse_loss(model(inputs[4:]), targets[4:]).backward()
        grads += [param.grad.clone() for param in module.parameters() if param.grad is not None]
    return grads


@pytest.mark.parametrize("scheme", LOSSY)
def test_accumulated_gradients_are_compressed_once(scheme: str) -> None:
    accumulated = workers.run(RANKS, accumulate, scheme, False, small_bytes=0)
    assert all_equal([digest(grads) for grads in accumulated])
    (at_once, *_) = workers.run(RANKS, accumulate, scheme, True, small_bytes=0)
    for one, other in zip(accumulated[0], at_once, strict=True):
        # Where two elements are almost equal, the other one may be sent.
        assert (one - other).norm() <= 0.05 * other.norm()


def with_bad_value(scheme: str, bad: float) -> list[bool]:
    module = nn.Linear(600, 30)
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    finite = []
    for factor in (1.0, bad, 1.0):
        model.zero_grad()
        model(torch.ones(2, 600)).sum().backward(torch.tensor(factor if poseidon.rank() == 1 else 1.0))
        assert module.weight.grad is not None
        finite.append(bool(module.weight.grad.isfinite().all()))
    return finite


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("scheme", LOSSY)
def test_a_bad_value_reaches_every_rank_and_is_gone_in_the_next_step(scheme: str, bad: float) -> None:
    assert workers.run(RANKS, with_bad_value, scheme, bad, small_bytes=0) == [[True, False, True]] * RANKS


def bytes_and_plan(scheme: str, lossy: str) -> list[tuple[str, float, float, str]]:
    width, height = (3000, 2000) if "powersgd" in (scheme, lossy) else (600, 300)  # so that headers do not count
    module = nn.Linear(width, height)
    model = poseidon.DistributedDataParallel(module, scheme=scheme, lossy=lossy)
    for step in range(3):
        model.zero_grad()
        model(torch.randn(400, width, generator=torch.Generator().manual_seed(step))).sum().backward()
    stats = {layer.name: layer for layer in model.synchronization_stats()}
    return [
        (row.scheme, row.bytes, stats[row.layer].bytes_sent + stats[row.layer].bytes_received, row.reason)
        for row in model.plan()
        if row.layer == "weight"
    ]


@pytest.mark.parametrize("scheme", LOSSY)
def test_the_bytes_are_those_of_the_plan(scheme: str) -> None:
    for asked, lossy, reason in ((scheme, "", "lossy, chosen by the user"), ("auto", scheme, "lossy, as allowed")):
        for answer in workers.run(RANKS, bytes_and_plan, asked, lossy, transport="tcp"):
            ((taken, planned, measured, why),) = answer
            assert taken == scheme
            assert reason in why
            # A server's messages are as many as a worker's, and not among those of the layer.
            assert measured * (2 if SCHEMES[scheme].uses_servers else 1) == pytest.approx(planned, rel=0.01)


def checkpointed(scheme: str, what: str) -> tuple[str, str, list[str]]:
    """Digests of gradients in the steps after a checkpoint: without a break, and of a new model that has loaded it."""
    module = mlp()

    def steps(model: poseidon.DistributedDataParallel, numbers: range) -> str:
        grads = []
        for step in numbers:
            inputs, targets = map(own_rows, mlp_batch(step, 8 * RANKS))
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            grads += [param.grad.clone() for param in model.module.parameters() if param.grad is not None]
        return digest(grads)

    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    steps(model, range(3))
    file = io.BytesIO()
    torch.save(
        model.state_dict() if what != "module" else {f"module.{k}": v for k, v in module.state_dict().items()}, file
    )
    expected = steps(model, range(3, 6))
    state = torch.load(io.BytesIO(file.getvalue()))
    if what == "other rank":
        state["_extra_state"]["rank"] += 1
    again = poseidon.DistributedDataParallel(mlp(), scheme=scheme)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again.load_state_dict(state)
    return expected, steps(again, range(3, 6)), [str(warning.message) for warning in told]


@pytest.mark.parametrize("scheme", LOSSY)
def test_a_checkpoint_has_what_was_not_sent(scheme: str) -> None:
    for expected, got, told in workers.run(RANKS, checkpointed, scheme, "all", small_bytes=0):
        assert got == expected
        assert told == []
    for what, reason in (("module", "has no residuals"), ("other rank", "has the residuals of rank")):
        for expected, got, told in workers.run(RANKS, checkpointed, scheme, what, small_bytes=0):
            assert got != expected
            assert len(told) == 1
            assert reason in told[0]


def state_keys(scheme: str) -> list[str]:
    model = poseidon.DistributedDataParallel(mlp(), scheme=scheme)
    return [key for key in model.state_dict() if not key.startswith("module.")]


def test_without_lossy_schemes_a_state_dict_is_that_of_torchs_class() -> None:
    assert workers.run(2, state_keys, "auto") == [[], []]
    assert workers.run(2, state_keys, "topk", small_bytes=0) == [["_extra_state"]] * 2


def plan_of(arguments: dict[str, Any]) -> list[tuple[str, str, str]]:
    module = nn.Sequential(nn.Linear(400, 300), nn.Embedding(3000, 40, sparse=True), nn.Conv2d(8, 200, 5))
    model = poseidon.DistributedDataParallel(module, **arguments)
    return [(row.layer, row.scheme, row.wire) for row in model.plan()]


def test_what_lossy_allows() -> None:
    exact = [("0.weight", "ps"), ("0.bias", "ps"), ("1.weight", "rows"), ("2.weight", "ps"), ("2.bias", "ps")]
    compressed = [(name, "topk" if name in ("0.weight", "2.weight") else scheme) for name, scheme in exact]

    def plan(arguments: dict[str, Any], **options: Any) -> list[tuple[str, str, str]]:
        first, second = workers.run(2, plan_of, arguments, small_bytes=32 << 10, **options)
        assert first == second
        return first  # type: ignore[no-any-return]

    def as_they_are(rows: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
        return [(*row, "fp32") for row in rows]

    rounded = [(name, scheme, "fp32" if scheme == "rows" else "bf16") for name, scheme in exact]
    assert plan({}) == as_they_are(exact)
    assert plan({}, lossy="topk") == as_they_are(compressed)
    assert plan({"scheme": "topk"}) == as_they_are(compressed)
    assert plan({"lossy": {"2": "topk"}}) == as_they_are(exact[:3] + compressed[3:])
    assert plan({"lossy": "bf16"}) == rounded
    assert plan({}, lossy="bf16") == rounded
    assert plan({"lossy": "bf16", "wire": "fp32"}) == as_they_are(exact)
    assert plan({}, lossy="bf16", wire="fp32") == as_they_are(exact)


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """What each of these constructions is refused with, on a rank of a job."""
    poseidon.init()
    texts = []
    for case in cases:
        module = nn.Linear(300, 200).to(case.pop("dtype", torch.float32))
        with pytest.raises(InvalidArgument) as error:
            poseidon.DistributedDataParallel(module, **case)
        texts.append(str(error.value))
    return texts


def test_what_cannot_be_honoured_is_refused() -> None:
    cases = {
        "leave one of the two out": {"lossy": "topk", "wire": "bf16"},
        "sends numbers as they are": {"scheme": "topk", "wire": "bf16"},
        "'sfb' is no choice of lossy": {"lossy": "sfb"},
        "weight has dtype torch.bfloat16": {"scheme": "topk", "dtype": torch.bfloat16},
        "weight has dtype torch.float64": {"scheme": {"weight": "topk"}, "dtype": torch.float64},
    }
    for texts in workers.run_fresh(2, refusals, list(cases.values())):
        for expected, text in zip(cases, texts, strict=True):
            assert expected in text


def of_other_fractions() -> str:
    poseidon.init(topk_fraction=0.01 * (1 + int(os.environ["RANK"])))
    with pytest.raises(Mismatch) as error:
        poseidon.DistributedDataParallel(nn.Linear(300, 200), scheme="topk")
    return str(error.value)


def test_ranks_that_disagree_are_told() -> None:
    for text in workers.run_fresh(2, of_other_fractions):
        assert "topk_fraction=0.02" in text


def with_hook() -> str:
    model = poseidon.DistributedDataParallel(nn.Linear(300, 200), scheme="topk")
    with pytest.raises(InvalidArgument) as error:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return str(error.value)


def test_a_wire_format_is_not_put_below_a_lossy_scheme() -> None:
    for text in workers.run(2, with_hook):
        assert "sends numbers as they are" in text
