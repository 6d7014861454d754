"""Updates on the servers: `.grad` is the mean over the ranks for whoever looks; the flags of kernels do not matter."""

from __future__ import annotations

import gc
import math
import re
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import poseidon.torch as poseidon
import poseidon.torch.training.trained_model as trained_model
import workers
from poseidon.torch.exchange.mover import StagedTransfer
from poseidon.torch.tensors.pending_gradient import PendingGradient
from test_torch_server_update import SPECS, Model, Spec, assert_same_bits, assert_same_tensor, optimizer_of, own_batch
from test_torch_staged import HostCopies
from torch_cases import all_equal, digest, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def pair(spec: Spec, module: Any = Model) -> list[tuple[Any, Any]]:
    """The same model and optimizer with updates on the servers and without."""
    parts = []
    for server in (True, False):
        model = poseidon.DistributedDataParallel(module(), scheme="ps")
        optimizer: Any = optimizer_of(model.module, spec)
        if server:
            optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
        parts.append((model, optimizer))
    return parts


def backward(model: nn.Module, step: int) -> None:
    mean_loss(model, *own_batch(step, torch.float32)).backward()


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, step: int) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"step {step}, {name}"
        if b.grad is not None:
            assert_same_tensor(a.grad, b.grad, f"step {step}, {name}")


def means(who: str, when: str) -> str:
    """Whoever looks, in whatever step; the training goes on as it would."""
    (model, optimizer), (other, reference) = pair(SPECS[4])
    for step in range(6):
        for part in (model, other):
            backward(part, step)
        looks = who == "all" or poseidon.rank() == 0
        if when == "before step" and looks:
            assert_same_gradients(model, other, step)
        optimizer.step()
        reference.step()
        if when == "after step" and looks:
            assert_same_gradients(model, other, step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        reference.zero_grad(set_to_none=step % 2 == 0)
        if looks and step % 2 == 1:
            assert_same_gradients(model, other, step)
        assert_same_bits(model, other, step)
    return parameters_digest(model)


@pytest.mark.parametrize("when", ["before step", "after step"])
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_gradients_are_the_means(who: str, when: str) -> None:
    assert all_equal(workers.run(3, means, who, when, chunk_bytes=4096, server_cores=2))


def staged(*args: Any) -> str:
    with mock.patch.object(trained_model, "make_transfer", lambda client, device: StagedTransfer(client, HostCopies())):
        return means(*args)


def test_gradients_are_the_means_through_host_memory() -> None:
    assert all_equal(workers.run(2, staged, "all", "before step"))


def never_cleared(accumulate: bool, weights: bool) -> str:
    """A backward adds to the mean, on all ranks, whoever has looked."""
    (model, optimizer), (other, reference) = pair((SGD, {"lr": 0.01}), mlp)
    for step in range(5):
        for part, stepping in ((model, optimizer), (other, reference)):
            if weights:
                part.set_weight((step + poseidon.rank()) % 3)
            if accumulate:
                with part.no_sync():
                    mean_loss(part, *map(own_rows, mlp_batch(50 + step, 4 * poseidon.world_size()))).backward()
            mean_loss(part, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
            if part is model and poseidon.rank() == 0 and step % 2 == 0:
                torch.nn.utils.clip_grad_norm_(part.parameters(), math.inf)
            if part is model and poseidon.rank() == 1 and step % 3 == 0:
                assert part.module[0].weight.grad.isfinite().all()
            stepping.step()
        assert_same_bits(model, other, step)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            if step == 4:
                assert_same_tensor(a.grad, b.grad, "at the end")
    return parameters_digest(model)


@pytest.mark.parametrize(("accumulate", "weights"), [(False, False), (True, False), (False, True), (True, True)])
def test_accumulating_over_steps(accumulate: bool, weights: bool) -> None:
    assert all_equal(workers.run(2, never_cleared, accumulate, weights))


def clipped(max_norm: float) -> list[Any]:
    (model, optimizer), (other, reference) = pair(SPECS[7], mlp)
    norms = []
    for step in range(3):
        for part, stepping in ((model, optimizer), (other, reference)):
            stepping.zero_grad()
            mean_loss(part, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(part.parameters(), max_norm).item())
            stepping.step()
        assert norms[-1] == norms[-2] > 0
        assert_same_bits(model, other, step)
    return [norms, parameters_digest(model)]


@pytest.mark.parametrize("max_norm", [math.inf, 1e6])
def test_clipping_that_changes_nothing(max_norm: float) -> None:
    assert all_equal(workers.run(2, clipped, max_norm))


def changed(how: str) -> str:
    model, optimizer = pair(SPECS[4], mlp)[0]
    mean_loss(model, *map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))).backward()
    param = model.module[2].bias
    if how == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "scaled":
        param.grad.mul_(2)
    elif how == "zeroed":
        param.grad.zero_()
    elif how == "replaced":
        param.grad = torch.ones_like(param)
    elif how == "clamped data":
        param.grad.data.clamp_(-1e-3, 1e-3)
    elif how == "NumPy":
        array = param.grad.numpy()
        array *= 0.5
    elif how == "NaN in data":
        param.grad.data.fill_(math.nan)
    with pytest.raises(poseidon.PoseidonError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("how", ["clipped", "scaled", "zeroed", "replaced", "clamped data", "NumPy", "NaN in data"])
def test_a_gradient_that_is_changed_is_an_error(how: str) -> None:
    for text in workers.run(2, changed, how):
        name = r"0\.weight" if how == "clipped" else r"2\.bias"
        assert re.search(rf"a change of {name}\.grad between backward and step\(\) .*use update='worker'", text)


def edited(how: str) -> str:
    """Writes to a parameter past PyTorch's counters, between two steps or only for an evaluation in between."""
    model, optimizer = pair(SPECS[4], mlp)[0]
    inputs, labels = map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))

    def step() -> None:
        optimizer.zero_grad()
        mean_loss(model, inputs, labels).backward()
        optimizer.step()

    step()
    param = model.module[0].weight
    kept = param.detach().clone()
    if how == "NumPy":
        array = param.detach().numpy()
        array *= 0.5
    else:
        param.data.clamp_(-0.01, 0.01)
    if how == "for an evaluation":
        with torch.no_grad():
            model(inputs)
        param.data.copy_(kept)
        step()
        return "went on"
    with pytest.raises(poseidon.PoseidonError) as caught:
        step()
    return str(caught.value)


@pytest.mark.parametrize("how", ["NumPy", "data", "for an evaluation"])
def test_a_parameter_that_is_edited_unseen_is_an_error_in_the_next_backward(how: str) -> None:
    for text in workers.run(2, edited, how):
        assert ("went on" if how == "for an evaluation" else "parameter 0.weight was changed on this worker") in text


class Awkward(nn.Module):
    """Gradients of odd shapes, in which NaN stands from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.ones(4, 300).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turned).sum() * self.scalar + self.empty.sum()


def read_and_left() -> None:
    """What is read and not written to is no change, whatever is in it."""
    model, optimizer = pair((SGD, {"lr": 0.0}), Awkward)[0]
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 300), math.nan if step else 1.0)).backward()
        arrays = [param.grad.numpy() for param in model.parameters()]
        assert sum(map(np.size, arrays)) == 1201
        optimizer.step()


def test_a_gradient_that_is_only_read_is_no_change() -> None:
    workers.run(2, read_and_left)


def in_one_tensor(server: bool, by_numpy: bool) -> tuple[str, str]:
    """The gradients lie in one tensor that the program has, which it reads and clears."""
    model, optimizer = pair(SPECS[4], mlp)[0 if server else 1]
    params = list(model.parameters())
    sizes = [param.numel() for param in params]
    memory = np.zeros(sum(sizes), np.float32) if by_numpy else None
    flat = torch.zeros(sum(sizes)) if memory is None else torch.from_numpy(memory)
    for param, part in zip(params, flat.split(sizes), strict=True):
        param.grad = part.view(param.shape)
    seen = []
    for step in range(4):
        mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
        optimizer.step()
        seen.append(flat.clone())
        if step != 1:  # whose gradients add up
            flat.zero_()
    return digest(seen), parameters_digest(model)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_gradients_in_one_tensor(by_numpy: bool) -> None:
    ours, theirs = (workers.run(2, in_one_tensor, server, by_numpy) for server in (True, False))
    assert ours == theirs
    assert all_equal(ours)


def changed_in_one_tensor() -> str:
    model, optimizer = pair(SPECS[4], mlp)[0]
    param = model.module[2].bias
    memory = torch.zeros(param.numel() + 1)
    param.grad = memory[1:]
    mean_loss(model, *map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))).backward()
    memory.numpy()[1:] *= 0.5
    with pytest.raises(poseidon.PoseidonError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_write_past_the_gradient_is_an_error() -> None:
    for text in workers.run(2, changed_in_one_tensor):
        assert re.search(r"a change of 2\.bias\.grad between backward and step\(\)", text)


def too_late() -> str:
    """A gradient that was taken in one step and is looked at in the next."""
    model, optimizer = pair(SPECS[4], mlp)[0]
    kept = []
    for step in range(2):
        mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
        kept += [model.module[0].weight.grad, model.module[0].bias.grad]
        assert digest(kept[1:2])  # looked at in time
        optimizer.step()
        optimizer.zero_grad()
    assert digest([kept[1]]) != digest([kept[3]])
    with pytest.raises(poseidon.PoseidonError) as caught:
        kept[0].sum()
    return str(caught.value)


def test_a_gradient_of_an_earlier_step_is_an_error() -> None:
    for text in workers.run(2, too_late):
        assert re.search(r"gradient of 0\.weight that is read is that of an earlier step.*keep a clone", text)


def pulls(set_to_none: bool) -> list[int]:
    """The bytes that looking costs: none where nobody does; all means in two round trips."""
    model, optimizer = pair(SPECS[4], mlp)[0]
    calls: list[int] = []
    counts = []
    pull = optimizer.server._pull
    with mock.patch.object(optimizer.server, "_pull", lambda entries, *rest: (calls.append(1), pull(entries, *rest))):
        for step in range(3):
            optimizer.zero_grad(set_to_none)
            mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
            if step == 1:
                assert isinstance(model.module[0].weight.grad, PendingGradient)
                torch._foreach_norm([param.grad for param in model.parameters()])
            optimizer.step()
            counts.append(len(calls))
    return counts


@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_who_looks_pays(set_to_none: bool) -> None:
    assert workers.run(2, pulls, set_to_none) == [[0, 2, 2]] * 2


def memory_of_gradients() -> None:
    """What this rank has pushed is not kept once the update is there, nor the mean any longer than `.grad` is."""
    model, optimizer = pair(SPECS[4], mlp)[0]
    param = model.synced_parameters[0].param
    own: list[Any] = []
    param.register_post_accumulate_grad_hook(lambda param: own.append(weakref.ref(param.grad)))
    for looks in (False, True):
        mean_loss(model, *map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))).backward()
        optimizer.synchronize()
        assert own.pop()() is None
        mean = weakref.ref(param.grad)
        if looks:
            assert param.grad.isfinite().all()
            mean = weakref.ref(param.grad)
        optimizer.step()
        assert mean() is not None
        optimizer.zero_grad()
        gc.collect()
        assert mean() is None


def test_gradients_free_their_memory() -> None:
    workers.run(2, memory_of_gradients)


FLAGS: list[Spec] = [
    (Adam, {"lr": 0.01, "fused": True}),
    (AdamW, {"lr": 0.01, "fused": True, "weight_decay": 0.1}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "fused": True}),
    (AdamW, {"lr": 0.01, "foreach": True}),
    (Adam, {"lr": 0.01, "foreach": False}),
]


def flags() -> str:
    """On the servers the arithmetic is that of torch's default kernels, whatever the flags say."""
    digests = []
    for kind, options in FLAGS:
        (model, optimizer), _ = pair((kind, options), mlp)
        plain = {key: value for key, value in options.items() if key not in ("fused", "foreach")}
        _, (other, reference) = pair((kind, plain), mlp)
        for step in range(4):
            for part, stepping in ((model, optimizer), (other, reference)):
                stepping.zero_grad()
                mean_loss(part, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
                stepping.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            assert_same_bits(model, other, f"{kind}, {options}, step {step}")
        assert optimizer.param_groups[0].get("fused") == options.get("fused")
        digests.append(parameters_digest(model))
    return " ".join(digests)


def test_flags_of_kernels_do_not_matter() -> None:
    assert all_equal(workers.run(2, flags))
