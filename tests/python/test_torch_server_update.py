"""Updates on the servers: bit for bit those of the torch optimizer, for all that a training loop does with one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import poseidon.torch as poseidon
import poseidon.torch.training.trained_model as trained_model
import workers
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.report import RankRecord, Report, rank_record
from poseidon.report.page import headlines
from poseidon.torch.exchange.mover import StagedTransfer
from test_cli_server import serving
from test_torch_gradients import MODULES
from test_torch_staged import HostCopies
from torch_cases import all_equal, digest, mean_loss, mlp, mlp_batch, own_rows, parameters_digest

Spec = tuple[type[Optimizer], dict[str, Any]]

SPECS: list[Spec] = [
    (SGD, {"lr": 0.02}),
    (SGD, {"lr": 0.002, "weight_decay": 0.01, "maximize": True}),
    (SGD, {"lr": 0.02, "momentum": 0.9}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": torch.tensor(0.002), "momentum": 0.5, "maximize": True}),
    (Adam, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "betas": (0.4, 0.95), "eps": 1e-3, "weight_decay": 0.02}),
    (Adam, {"lr": 0.01, "maximize": True}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "weight_decay": 0.3, "maximize": True, "betas": (0.0, 0.5)}),
]


class Model(nn.Module):
    """Layers of several chunks and of a few bytes, a tied weight, one used now and then, one frozen, one never used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(48, 130, dtype=dtype)
        self.tied = nn.Linear(48, 130, dtype=dtype)
        self.tied.weight = self.first.weight
        self.sometimes = nn.Linear(130, 130, dtype=dtype)
        self.frozen = nn.Linear(130, 130, dtype=dtype).requires_grad_(False)
        self.never = nn.Linear(3, 3, dtype=dtype)
        self.out = nn.Linear(130, 4, dtype=dtype)
        self.turned = nn.Parameter(0.1 * torch.randn(4, 130, dtype=dtype).t())  # not contiguous
        self.gappy = nn.Parameter((0.2 * torch.randn(4, 8, dtype=dtype))[:, ::2])  # not dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x) + self.tied(x))
        if x[0, 0] > 0:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return (self.out(self.frozen(hidden)) + hidden @ self.turned) @ self.gappy


def own_batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`sometimes` is used by all ranks, by rank 0 alone, by none, by turns."""
    inputs, targets = mlp_batch(step, 4 * poseidon.world_size(), dtype)
    inputs, targets = own_rows(inputs).clone(), own_rows(targets)
    inputs[0, 0] = 1.0 if step % 3 == 0 or (step % 3 == 1 and poseidon.rank() == 0) else -1.0
    return inputs, targets


def groups_of(module: nn.Module, count: int) -> Any:
    params = list(module.parameters())
    if count == 1:
        return params
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003, "weight_decay": 0.05}]


def optimizer_of(module: nn.Module, spec: Spec, group_count: int = 1) -> Optimizer:
    kind, options = spec
    return kind(groups_of(module, group_count), **copy.deepcopy(options))


def scheduler_of(optimizer: Optimizer, name: str) -> Any:
    if name == "step":
        return StepLR(optimizer, step_size=2, gamma=0.3)
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=12) if name == "one cycle" else None


def train(
    server: bool,
    spec: Spec,
    dtype: torch.dtype = torch.float32,
    group_count: int = 1,
    schedule: str = "",
    accumulate: bool = False,
    set_to_none: bool = True,
) -> Iterator[tuple[nn.Module, Optimizer]]:
    """Trains with the update on the servers or on the workers; yields after every step."""
    module = Model(dtype)
    optimizer = optimizer_of(module, spec, group_count)
    model = poseidon.DistributedDataParallel(module, scheme="ps")
    if server:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
    scheduler = scheduler_of(optimizer, schedule)
    for step in range(6):
        if accumulate:
            with model.no_sync():
                mean_loss(model, *own_batch(100 + step, dtype)).backward()
        mean_loss(model, *own_batch(step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if scheduler is not None:
            scheduler.step()
        yield module, optimizer


def assert_same_tensor(ours: torch.Tensor, theirs: torch.Tensor, where: str, root: bool = False) -> None:
    """To the bit; where a float64 square root is in it (`root`), which PyTorch does not always round, nearly."""
    assert ours.dtype == theirs.dtype
    if root and ours.dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13, msg=lambda text: f"{where}: {text}")
    else:
        assert ours.isfinite().all(), where
        assert digest([ours]) == digest([theirs]), f"{where}: {(ours - theirs).abs().max()}"


def assert_same_bits(ours: nn.Module, theirs: nn.Module, when: Any = "", root: bool = False) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_same_tensor(a, b, f"{when}, {name}", root)


def assert_same_state(ours: Any, theirs: Any, where: str = "", root: bool = False) -> None:
    """Two state_dicts, with the same keys in the same order."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_same_state(ours[key], theirs[key], f"{where}.{key}", root)
    elif isinstance(ours, torch.Tensor):
        assert ours.stride() == theirs.stride(), where
        assert_same_tensor(ours, theirs, where, root)
    else:
        assert ours == theirs, where


def compare(specs: list[Spec], *args: Any) -> str:
    """Training with both updates gives the same bits after every step, and the same optimizer state."""
    digests = []
    for spec in specs:
        root = spec[0] is not SGD
        pairs = zip(train(True, spec, *args), train(False, spec, *args), strict=True)
        for step, pair in enumerate(pairs):
            (ours, optimizer), (theirs, reference) = pair
            assert_same_bits(ours, theirs, f"{spec}, step {step}", root)
        assert_same_state(optimizer.state_dict(), reference.state_dict(), str(spec), root)
        assert not optimizer.state or poseidon.world_size() == 1
        digests.append(parameters_digest(ours))
    return " ".join(digests)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_as_the_worker_side(world_size: int) -> None:
    specs = [SPECS[index] for index in (4, 7, 9)] if world_size != 2 else SPECS
    assert all_equal(workers.run(world_size, compare, specs, chunk_bytes=8192))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameter_groups_schedules_and_accumulation(dtype: torch.dtype) -> None:
    specs = [SPECS[index] for index in (3, 6, 9)]
    for schedule in ("step", "one cycle"):
        if schedule == "one cycle":
            specs[0] = SPECS[2]
        assert all_equal(workers.run(2, compare, specs, dtype, 2, schedule, True, schedule == "step"))


def same_rows_everywhere(specs: list[Spec]) -> None:
    """With equal gradients on all ranks their mean is exact: the bits are those of torch in one process."""
    for spec in specs:
        plain = mlp()
        module = copy.deepcopy(plain)
        reference = optimizer_of(plain, spec)
        model = poseidon.DistributedDataParallel(module)
        optimizer = poseidon.DistributedOptimizer(optimizer_of(module, spec), model, update="server")
        for step in range(20):
            batch = mlp_batch(step, 4)
            for part, stepping in ((model, optimizer), (plain, reference)):
                stepping.zero_grad()
                mean_loss(part, *batch).backward()
                stepping.step()
            assert_same_bits(module, plain, f"{spec}, step {step}")


def test_same_bits_as_torch_in_one_process() -> None:
    workers.run(2, same_rows_everywhere, SPECS)


def median_of_gradients() -> None:
    """One rank's gradients are useless. The median withstands them, and `.grad` shows it."""
    ours, plain = mlp(), mlp()
    model = poseidon.DistributedDataParallel(ours)
    optimizer = poseidon.DistributedOptimizer(
        SGD(ours.parameters(), lr=0.1, momentum=0.9), model, update="server", aggregator="median"
    )
    reference = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        inputs, targets = mlp_batch(step, 3)
        useful = []
        for rank in range(3):
            gradients = torch.autograd.grad(mean_loss(plain, inputs[[rank]], targets[[rank]]), list(plain.parameters()))
            useful.append([gradient * 1e6 if rank == step % 3 else gradient for gradient in gradients])
        for param, *of_ranks in zip(plain.parameters(), *useful, strict=True):
            param.grad = torch.stack(of_ranks).median(dim=0).values
        reference.step()
        mine = poseidon.rank()
        loss = mean_loss(model, inputs[[mine]], targets[[mine]])
        (loss * (1e6 if mine == step % 3 else 1)).backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()


def test_an_aggregator_makes_the_gradient() -> None:
    workers.run(3, median_of_gradients)


def refused_aggregators() -> None:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match="pass update='server'"):
        poseidon.DistributedOptimizer(optimizer, model, aggregator="median")
    if poseidon.world_size() == 1:
        with pytest.raises(InvalidArgument, match="leave it out with one worker"):
            poseidon.DistributedOptimizer(optimizer, model, update="server", aggregator="median")
        return
    name = "median" if poseidon.rank() == 0 else "sum"
    with pytest.raises(Mismatch, match="optimizer"):
        poseidon.DistributedOptimizer(optimizer, model, update="server", aggregator=name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_aggregator_needs_servers_and_the_same_name_everywhere(world_size: int) -> None:
    workers.run(world_size, refused_aggregators)


def compare_modules(kinds: list[type[nn.Module]]) -> str:
    """Gradients that come in other ways than from one use of a layer."""
    digests = []
    for kind in kinds:
        ours, theirs = (poseidon.DistributedDataParallel(kind(), scheme="ps") for _ in range(2))
        optimizer: Optimizer = Adam(ours.parameters(), lr=0.01)
        optimizer = poseidon.DistributedOptimizer(optimizer, ours, update="server")
        reference = Adam(theirs.parameters(), lr=0.01)
        for step in range(3):
            for model, stepping in ((ours, optimizer), (theirs, reference)):
                inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
                stepping.zero_grad()
                mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
                stepping.step()
            assert_same_bits(ours, theirs, f"{kind.__name__}, step {step}")
        digests.append(parameters_digest(ours))
    return " ".join(digests)


@pytest.mark.parametrize("schedule", ["wait_free", "sequential"])
def test_same_bits_for_all_kinds_of_modules(schedule: str) -> None:
    assert all_equal(workers.run(2, compare_modules, MODULES, schedule=schedule))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_same_bits_over_several_cores_and_flows(transport: str) -> None:
    options: dict[str, Any] = {"chunk_bytes": 4096, "server_cores": 2, "flows": 2, "transport": transport}
    specs = [SPECS[4], SPECS[9]]
    assert all_equal(workers.run(2, compare, specs, torch.float32, 2, "step", **options))


def test_dedicated_servers_hold_all_of_the_state() -> None:
    with serving("--server-cores", "2") as (first, _), serving() as (second, _):
        servers = [first, second]
        assert all_equal(workers.run(2, compare, [SPECS[4]], servers=servers, chunk_bytes=4096))
        parameter_bytes = sum(param.nbytes for param in mlp().parameters())
        held = workers.run(2, memory, SPECS[6], servers=servers, chunk_bytes=4096)
    assert held == [(0, 2 * parameter_bytes)] * 2


def compiled_under_autocast() -> str:
    results = []
    for server in (True, False):
        model, optimizer = wrapped(SPECS[9], server)
        faster: Any = torch.compile(model, backend="aot_eager")
        for step in range(3):
            inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean_loss(faster, own_rows(inputs), own_rows(targets))
            loss.backward()
            optimizer.step()
        results.append(model)
    assert_same_bits(*results)
    return parameters_digest(results[0])


def test_compiled_under_autocast() -> None:
    assert all_equal(workers.run(2, compiled_under_autocast))


def staged(*args: Any) -> str:
    """The path of device tensors, on host memory."""
    with mock.patch.object(trained_model, "make_transfer", lambda client, device: StagedTransfer(client, HostCopies())):
        return compare(*args)


def test_staged_through_host_memory() -> None:
    assert all_equal(workers.run(2, staged, [SPECS[4], SPECS[9]]))


def wrapped(spec: Spec, server: bool = True) -> tuple[Any, Any]:
    """An mlp under the wrapper and its optimizer, on the servers or not."""
    module = mlp()
    model = poseidon.DistributedDataParallel(module, scheme="ps")
    optimizer = optimizer_of(module, spec)
    return model, poseidon.DistributedOptimizer(optimizer, model, update="server") if server else optimizer


def step_once(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
    optimizer.zero_grad()
    mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
    optimizer.step()


# Which parameters.


def some_of_the_parameters(scheme: str) -> str:
    """One optimizer on the servers, one on the workers, one parameter in none; small layers share messages."""
    models = []
    for server in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)])
        model = poseidon.DistributedDataParallel(module, scheme=scheme)
        params = list(module.parameters())
        optimizers: list[Optimizer] = [SGD(params[1:4], lr=0.1, momentum=0.9), Adam(params[4:6], lr=0.01)]
        optimizers.append(AdamW(params[6:], lr=0.01))
        if server:
            optimizers[::2] = [poseidon.DistributedOptimizer(one, model, update="server") for one in optimizers[::2]]
        models.append((model, optimizers))
    targets = torch.ones(2 * poseidon.world_size(), 48)
    for step in range(4):
        inputs = mlp_batch(step, 2 * poseidon.world_size())[0]
        for model, optimizers in models:
            model.zero_grad()
            mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
            for optimizer in optimizers:
                optimizer.step()
        if scheme == "ps":
            assert_same_bits(models[0][0], models[1][0])
        else:
            for a, b in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
                torch.testing.assert_close(a, b)
    plan = {row.layer: row for row in models[0][0].plan()}
    assert plan["1.weight"].reason == "updated by the servers"
    assert plan["1.weight"].scheme == "ps"
    assert plan["2.weight"].reason != "updated by the servers"
    return parameters_digest(models[0][0])


@pytest.mark.parametrize("scheme", ["ps", "auto", "sfb"])
def test_some_of_the_parameters(scheme: str) -> None:
    assert all_equal(workers.run(3, some_of_the_parameters, scheme, small_bytes=512))


def memory(spec: Spec) -> tuple[int, int]:
    """As the report of a run has it."""
    model, optimizer = wrapped(spec)
    model.record()
    step_once(model, optimizer, 0)
    size = poseidon.world_size()
    record = rank_record(0, "", size, model.plan(), model.recorded_steps(), [], optimizer=optimizer.memory())
    return record.optimizer_bytes, record.worker_side_optimizer_bytes


def test_the_report_shows_the_memory() -> None:
    def figures(*sizes: tuple[int, int]) -> list[tuple[str, str, str]]:
        ranks = [
            RankRecord(rank, "", 0, optimizer_bytes=here, worker_side_optimizer_bytes=all_of_it)
            for rank, (here, all_of_it) in enumerate(sizes)
        ]
        return headlines(Report("", "", [], [], [], ranks))

    text = "4 times less than with the update on workers"
    assert figures((1000, 8000), (2000, 8000)) == [("Optimizer memory per worker", "2 kB", text)]
    assert figures((0, 0)) == []


def test_memory_falls_by_the_number_of_shards() -> None:
    parameter_bytes = sum(param.nbytes for param in mlp().parameters())
    for spec, arrays in ((SPECS[0], 0), (SPECS[2], 1), (SPECS[6], 2)):
        assert workers.run(1, memory, spec)[0] == (arrays * parameter_bytes,) * 2
        answers = workers.run(4, memory, spec, chunk_bytes=512)
        assert {worker_side for _, worker_side in answers} == {arrays * parameter_bytes}
        assert sum(here for here, _ in answers) == arrays * parameter_bytes
        assert max(here for here, _ in answers) <= 1.1 * arrays * parameter_bytes / 4
