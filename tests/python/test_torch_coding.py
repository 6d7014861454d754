"""Coding: with it and without it parameters and optimizers have the same bits, whatever travels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.torch.process import context
from test_torch_staged import staged
from torch_cases import all_equal, digest

RANKS = 2
STEPS = 3


class Model(nn.Module):
    """Layers that travel as factors, dense and in a group, and a table of which a batch touches a few rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(600, 32, dtype=dtype)
        self.wide = nn.Linear(32, 400, dtype=dtype)
        self.norm = nn.LayerNorm(400, dtype=dtype)
        self.last = nn.Linear(400, 50, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(torch.relu(self.wide(self.table(ids)))))
        return out


def train(coding: str, scheme: str, update: str, dtype: torch.dtype, rows: bool) -> tuple[str, list[int]]:
    """What the model and the optimizer are in the end, and the bytes sent as they travelled and as they are."""
    poseidon.init(transport="tcp", coding=coding, timeout=30)
    module = Model(dtype)
    chosen: Any = {"table": "rows", "*": scheme} if rows else scheme
    model = poseidon.DistributedDataParallel(module, scheme=chosen)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if update:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=update)
    draw = torch.Generator().manual_seed(poseidon.rank())
    for _ in range(STEPS):
        ids = torch.randint(0, 600, (16,), generator=draw)
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    model(ids)  # waits for the last step
    state = optimizer.state_dict()["state"]
    moments = [value for _, entry in sorted(state.items()) for value in entry.values() if torch.is_tensor(value)]
    traffic = context.context().client.traffic()
    assert ("of these bytes so far" in str(model.plan())) == (coding == "on")
    bits = digest([param.detach() for param in module.parameters()] + moments)
    return bits, [traffic.bytes_sent, traffic.plain_bytes_sent, traffic.bytes_received, traffic.plain_bytes_received]


@pytest.mark.parametrize(
    ("scheme", "update", "dtype", "rows"),
    [
        ("ps", "", torch.float32, False),
        ("sfb", "", torch.float32, True),
        ("sharded_factors", "worker", torch.float32, True),
        ("ps", "server", torch.float32, False),
        ("ps", "worker", torch.bfloat16, False),
        ("ps", "", torch.float16, False),
    ],
)
def test_a_job_has_the_same_bits_with_coding_and_without(
    scheme: str, update: str, dtype: torch.dtype, rows: bool
) -> None:
    coded = workers.run_fresh(RANKS, train, "on", scheme, update, dtype, rows)
    plain = workers.run_fresh(RANKS, train, "off", scheme, update, dtype, rows)
    assert all_equal([bits for bits, _ in coded + plain])
    for _, (sent, plain_sent, received, plain_received) in coded:
        assert sent < 0.97 * plain_sent
        assert received < 0.97 * plain_received
    for _, (sent, plain_sent, received, plain_received) in plain:
        assert (sent, received) == (plain_sent, plain_received)


def test_parameters_of_devices_travel_as_differences() -> None:
    """What each has received last lies in host memory, beside the parameter."""
    args: Any = "on", "ps", "server", torch.bfloat16, False
    here = workers.run_fresh(RANKS, train, *args)
    on_device = workers.run_fresh(RANKS, staged, train, *args)
    assert all_equal([bits for bits, _ in here + on_device])
    for (_, (*_, received, plain)), (_, (*_, own, own_plain)) in zip(here, on_device, strict=True):
        assert own / own_plain < received / plain + 0.03


def meet(codings: list[str]) -> str:
    try:
        poseidon.init(coding=codings[int(os.environ["RANK"])], timeout=30)
    except poseidon.PoseidonError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_say_so() -> None:
    texts = workers.run_fresh(RANKS, meet, ["on", "off"])
    assert all("coding" in text and "rank 0" in text and "rank 1" in text for text in texts), texts


def one_value(param: torch.Tensor) -> None:
    """As a program writes past the version counter; the adapter looks at other values."""
    param.data.view(-1)[1] += 1


def all_of_one_row(param: torch.Tensor) -> None:
    param.detach().numpy()[0, 1:] = 0.5


def clamp_a_part(param: torch.Tensor) -> None:
    param.data.view(-1)[5:60].clamp_(-1e-3, 1e-3)


def swap_and_back(param: torch.Tensor) -> None:
    """As for an evaluation with averaged weights."""
    own = param.data.clone()
    param.data.mul_(0.5)
    param.data.copy_(own)


def train_with_a_change(coding: str, change: Any, changing: int) -> str:
    # The check of replicas would find it.
    poseidon.init(transport="tcp", coding=coding, replica_check="off", timeout=30)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10))
    model = poseidon.DistributedDataParallel(module, scheme="ps")
    optimizer = poseidon.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model, update="server")
    draw = torch.Generator().manual_seed(poseidon.rank())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 300, generator=draw)).square().mean()
        if step in (1, 2) and poseidon.rank() == changing:
            change(module[0].weight)
        loss.backward()
        optimizer.step()
    return digest([param.detach() for param in module.parameters()])


@pytest.mark.parametrize("change", [one_value, all_of_one_row, clamp_a_part, swap_and_back])
def test_a_parameter_that_one_rank_has_changed_is_the_servers_after_the_step(change: Any) -> None:
    digests = [
        result
        for coding in ("on", "off")
        for changing in range(RANKS)
        for result in workers.run_fresh(RANKS, train_with_a_change, coding, change, changing)
    ]
    # Gradients are those of the forward pass before the change, since no layer is below the one that changes.
    assert all_equal(digests)


def start(coding: str, dtype: torch.dtype) -> tuple[str, int, int]:
    poseidon.init(transport="tcp", coding=coding, timeout=30)
    torch.manual_seed(poseidon.rank())
    module = nn.Linear(600, 500, dtype=dtype)
    poseidon.DistributedDataParallel(module)
    traffic = context.context().client.traffic()
    return (
        digest([param.detach() for param in module.parameters()]),
        traffic.bytes_received,
        traffic.plain_bytes_received,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_of_a_start_are_coded(dtype: torch.dtype) -> None:
    coded = workers.run_fresh(RANKS, start, "on", dtype)
    plain = workers.run_fresh(RANKS, start, "off", dtype)
    assert all_equal([bits for bits, *_ in coded + plain])
    received, plain_received = coded[1][1:]
    assert received < (0.92 if dtype != torch.float64 else 1.01) * plain_received
