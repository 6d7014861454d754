"""Updates on the servers with fewer bits on the way or on the device: servers sum and keep float32."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from test_torch_wire import rounded
from torch_cases import all_equal, digest, mlp, mlp_batch, parameters_digest

RANKS = 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=0.01),
}


def gradients_of(module: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    """What this rank alone has in this step."""
    inputs, targets = (part.chunk(RANKS)[rank] for part in mlp_batch(step, 4 * RANKS))
    dtype = next(module.parameters()).dtype
    loss = F.mse_loss(module(inputs.to(dtype)), targets.to(dtype))
    return list(torch.autograd.grad(loss, list(module.parameters())))


class Reference:
    """The same training in one process: float32 masters with torch's optimizer, and the model as devices see it."""

    def __init__(self, module: nn.Module, optimizer: str, wire: str, parameter_wire: str) -> None:
        self.device, self._wire, self._parameter_wire = copy.deepcopy(module), wire, parameter_wire
        self.masters = [param.detach().float().clone() for param in module.parameters()]
        self._optimizer: Optimizer = OPTIMIZERS[optimizer](self.masters)
        self._show()

    def _show(self) -> None:
        with torch.no_grad():
            for param, master in zip(self.device.parameters(), self.masters, strict=True):
                param.copy_(rounded(master, self._parameter_wire))

    def step(self, step: int) -> None:
        all_gradients = [gradients_of(self.device, step, rank) for rank in range(RANKS)]
        for index, master in enumerate(self.masters):
            total = rounded(all_gradients[0][index].float(), self._wire)
            for gradients in all_gradients[1:]:
                total = total + rounded(gradients[index].float(), self._wire)
            master.grad = total / RANKS  # never rounded
        self._optimizer.step()
        self._show()


def train(
    dtype: torch.dtype, optimizer: str, wire: str, parameter_wire: str, steps: int = 4
) -> tuple[list[bool], str, str]:
    """Which steps leave the reference's bits, all replicas' bits, and whether the masters are the reference's."""
    module = mlp(dtype)
    reference = Reference(module, optimizer, wire, parameter_wire)
    model = poseidon.DistributedDataParallel(module, wire=wire)
    distributed = poseidon.DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()), model, update="server")
    same = [parameters_digest(module) == parameters_digest(reference.device)]
    for step in range(steps):
        distributed.zero_grad()
        inputs, targets = (part.chunk(RANKS)[poseidon.rank()] for part in mlp_batch(step, 4 * RANKS))
        F.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()
        distributed.step()
        reference.step(step)
        same.append(parameters_digest(module) == parameters_digest(reference.device))
    bits = parameters_digest(module)
    distributed.pull_parameters()
    expected = [rounded(one, "bf16").to(dtype) if dtype == torch.bfloat16 else one for one in reference.masters]
    return same, bits, "masters" if parameters_digest(module) == digest(expected) else "others"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_rounded_gradients_go_into_the_update_without_another_rounding(wire: str, optimizer: str) -> None:
    answers = workers.run(RANKS, train, torch.float32, optimizer, wire, "fp32")
    assert all(all(same) and masters == "masters" for same, _, masters in answers), answers
    assert all_equal([bits for _, bits, _ in answers])


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_parameters_come_back_rounded_and_the_servers_keep_float32(wire: str) -> None:
    answers = workers.run(RANKS, train, torch.float32, "adamw", wire, "bf16", parameter_wire="bf16")
    assert all(all(same) and masters == "masters" for same, _, masters in answers), answers
    assert all_equal([bits for _, bits, _ in answers])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_bfloat16_model_has_float32_masters_on_the_servers(optimizer: str) -> None:
    answers = workers.run(RANKS, train, torch.bfloat16, optimizer, "fp32", "bf16")
    assert all(all(same) and masters == "masters" for same, _, masters in answers), answers
    assert all_equal([bits for _, bits, _ in answers])


def bytes_of_a_parameter() -> tuple[float, int, dict[str, torch.dtype]]:
    """On the device, while a step has its gradients; of the optimizer's state here; and the dtypes of state_dict()."""
    module = mlp(torch.bfloat16)
    model = poseidon.DistributedDataParallel(module)
    inner = AdamW(model.parameters(), lr=0.01)
    distributed = poseidon.DistributedOptimizer(inner, model, update="server")
    model(torch.ones(2, 48, dtype=torch.bfloat16)).sum().backward()
    held = sum(param.nbytes + (0 if param.grad is None else param.grad.nbytes) for param in module.parameters())
    distributed.step()
    assert not inner.state
    state = distributed.state_dict()["state"][0]
    return (
        held / sum(param.numel() for param in module.parameters()),
        distributed.memory().worker_side,
        {name: value.dtype for name, value in state.items() if value.dim()},
    )


def test_a_bfloat16_model_takes_four_bytes_a_parameter_on_the_device() -> None:
    for held, state_bytes, dtypes in workers.run(2, bytes_of_a_parameter):
        assert held == 4
        assert state_bytes == 2 * 4 * sum(param.numel() for param in mlp().parameters())
        assert dtypes == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def continued(dtype: torch.dtype, first: int, last: int) -> tuple[int, str]:
    """Steps `first` to `last`; the version of the checkpoint that they go on from, and the bits at the end."""
    module = mlp(dtype)
    model = poseidon.DistributedDataParallel(module)
    inner = AdamW(model.parameters(), lr=0.01)
    distributed = poseidon.DistributedOptimizer(inner, model, update="server", resume=first > 0)
    for step in range(first, last):
        inputs, targets = (part.chunk(2)[poseidon.rank()].to(dtype) for part in mlp_batch(step, 8))
        distributed.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        distributed.step()
    return distributed.resumed_version, parameters_digest(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(dtype: torch.dtype, tmp_path: Path) -> None:
    options = {"parameter_wire": "bf16", "wire": "bf16"}
    straight = workers.run_fresh(2, in_a_job, continued, (dtype, 0, 8), options)
    kept = {**options, "checkpoint_dir": str(tmp_path), "checkpoint_every": 5}
    interrupted = workers.run_fresh(2, in_a_job, continued, (dtype, 0, 5), kept)
    resumed = workers.run_fresh(2, in_a_job, continued, (dtype, 5, 8), kept)
    assert [version for version, _ in interrupted] == [0, 0]
    assert [version for version, _ in resumed] == [5, 5]
    assert all_equal([bits for _, bits in straight + resumed])


def masters_after(what: str) -> tuple[bool, bool, list[str]]:
    """Whether the servers keep the digits of the first layer's and of the last layer's values, and what is warned."""
    module = mlp()
    model = poseidon.DistributedDataParallel(module)
    distributed = poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.05), model, update="server")

    def step(number: int) -> None:
        inputs, targets = (part.chunk(2)[poseidon.rank()] for part in mlp_batch(number, 8))
        distributed.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        distributed.step()

    step(0)
    seen = copy.deepcopy(module.state_dict())
    distributed.pull_parameters()
    masters = copy.deepcopy(module.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if what not in ("pulled", "saved"):
            module.load_state_dict(seen)
        if what == "edited":
            with torch.no_grad():
                module[4].weight.mul_(1.001)
        if what == "saved":
            step(1)
            module.load_state_dict(seen)
        if what == "loaded":
            distributed.load_state_dict(distributed.state_dict())
        else:
            distributed.push_parameters()
    distributed.pull_parameters()
    first, last = (torch.equal(module[i].weight, masters[f"{i}.weight"]) for i in (0, 4))
    assert torch.equal(rounded(module[0].weight, "bf16"), seen["0.weight"])
    return first, last, [str(one.message) for one in told if "bfloat16" in str(one.message)]


@pytest.mark.parametrize(
    ("what", "first", "last"),
    [
        ("unchanged", True, True),
        ("loaded", True, True),
        ("pulled", True, True),
        ("edited", True, False),
        ("saved", False, False),
    ],
)
def test_pushed_parameters_that_are_unchanged_keep_the_servers_digits(what: str, first: bool, last: bool) -> None:
    answers = workers.run(2, masters_after, what, parameter_wire="bf16")
    assert [answer[:2] for answer in answers] == [(first, last)] * 2
    assert [len(told) for *_, told in answers] == [int(what == "saved"), 0]


def in_a_job(case: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    poseidon.init(**options)
    try:
        return case(*args)
    finally:
        poseidon.shutdown()


def refusal(dtype: torch.dtype, wire: str, aggregator: str) -> str:
    model = poseidon.DistributedDataParallel(mlp(dtype), wire=wire)
    try:
        poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, update="server", aggregator=aggregator)
    except InvalidArgument as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("dtype", "wire", "aggregator", "said"),
    [
        (torch.float32, "bf16", "median", "travel in fewer bits"),
        (torch.bfloat16, "fp32", "median", "travel in fewer bits"),
        (torch.float16, "fp32", "sum", "servers update float32, float64 and bfloat16"),
        (torch.float32, "int8", "sum", "taken"),
    ],
)
def test_what_servers_cannot_do_is_refused(dtype: torch.dtype, wire: str, aggregator: str, said: str) -> None:
    for answer in workers.run(2, refusal, dtype, wire, aggregator):
        assert said in answer


def near(wire: str) -> tuple[str, float]:
    """The bits of a training with this format, and how far it is from one without rounding."""
    module = mlp()
    reference = Reference(module, "sgd", "fp32", "fp32")
    model = poseidon.DistributedDataParallel(module, wire=wire)
    distributed = poseidon.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model, update="server")
    for step in range(4):
        inputs, targets = (part.chunk(RANKS)[poseidon.rank()] for part in mlp_batch(step, 4 * RANKS))
        distributed.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        distributed.step()
        reference.step(step)
    pairs = zip(module.parameters(), reference.masters, strict=True)
    return parameters_digest(module), max((param - master).abs().max().item() for param, master in pairs)


def test_gradients_of_8_bits_stay_near_those_of_32() -> None:
    answers = workers.run(RANKS, near, "int8")
    assert all_equal([bits for bits, _ in answers])
    assert 0 < answers[0][1] < 1e-3


def paced(dtype: torch.dtype) -> str:
    model = poseidon.DistributedDataParallel(mlp(dtype), wire="int8" if dtype == torch.float32 else "fp32")
    distributed = poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.05), model, update="server")
    for step in range(6):
        inputs, targets = (part.chunk(2)[poseidon.rank()].to(dtype) for part in mlp_batch(step, 8))
        distributed.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        distributed.step()
    distributed.pull_parameters()
    assert all(param.isfinite().all() for param in model.parameters())
    return parameters_digest(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pace", [{"stragglers": "drop"}, {"consistency": "ssp"}, {"aggregation": "wide"}])
def test_every_pace_takes_fewer_bits(dtype: torch.dtype, pace: dict[str, str]) -> None:
    answers = workers.run_fresh(2, in_a_job, paced, (dtype,), {"parameter_wire": "bf16", **pace})
    assert all_equal(answers)
