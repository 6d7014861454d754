"""A later DistributedOptimizer of the same model takes over from an earlier one, on workers and on servers."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from optimizer_kinds import ClipsTotal
from poseidon.errors import PoseidonError
from torch_cases import all_equal, digest, mean_loss, message_of, mlp_batch, own_rows, parameters_digest

KINDS = ("worker", "server", "whole")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(48, 130), nn.Tanh(), nn.Linear(130, 130), nn.Tanh())
        self.head = nn.Linear(130, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def adam(module: Net) -> Optimizer:
    return Adam(module.parameters(), lr=0.01)


def momentum(module: Net) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


def head_only(module: Net) -> Optimizer:
    return AdamW(module.head.parameters(), lr=0.02)


def whole(module: Net) -> Optimizer:
    return ClipsTotal(module.parameters())


def distributed(make: Any, model: Any, kind: str) -> Any:
    if kind == "plain":
        return make(model.module)
    if kind == "whole":
        return poseidon.DistributedOptimizer(whole(model.module), model)
    return poseidon.DistributedOptimizer(make(model.module), model, update=kind)


def steps(model: Any, optimizer: Any, first: int, count: int = 3) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model.zero_grad()
        mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
        optimizer.step()


def trained(makes: Any, kinds: Any, drops: bool) -> str:
    """One optimizer after the other, which is made while the earlier one lives, or after it was dropped."""
    results = []
    for distributes in (True, False):
        model = poseidon.DistributedDataParallel(Net(), scheme="ps")
        optimizer = None
        for number, (make, kind) in enumerate(zip(makes, kinds, strict=True)):
            if drops:
                optimizer = None
                gc.collect()
            if distributes:
                optimizer = distributed(make, model, kind)
            else:
                optimizer = (whole if kind == "whole" else make)(model.module)
            steps(model, optimizer, 3 * number)
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        results.append(parameters_digest(model))
        states = optimizer.state_dict()["state"]  # type: ignore[union-attr]
        results.append(digest([value for state in states.values() for _, value in sorted(state.items())]))
    assert results[:2] == results[2:], (makes, kinds, drops)
    return results[0]


def every_pair() -> list[str]:
    digests = [trained((adam, momentum), kinds, False) for kinds in itertools.product(KINDS, KINDS)]
    digests += [trained((head_only, adam), (kind, kind), drops) for kind in KINDS[:2] for drops in (False, True)]
    digests.append(trained((adam, head_only, momentum), ("server", "server", "worker"), True))
    digests.append(trained((adam, head_only, momentum), ("worker", "server", "server"), False))
    return digests


def test_a_later_optimizer_takes_over() -> None:
    assert all_equal(workers.run(2, every_pair))


def one_worker() -> None:
    trained((adam, head_only, momentum), ("worker", "server", "worker"), False)


def test_a_later_optimizer_takes_over_with_one_worker() -> None:
    workers.run(1, one_worker)


def ended() -> list[str]:
    """The earlier one says that it is over, instead of updating what is another's."""
    model = poseidon.DistributedDataParallel(Net(), scheme="ps")
    texts = []
    for kind in ("worker", "server"):
        first = distributed(adam, model, kind)
        steps(model, first, 0)
        second = distributed(head_only, model, kind)
        for call in (first.step, *([first.state_dict, first.push_parameters] if kind == "server" else [])):
            with pytest.raises(poseidon.PoseidonError) as caught:
                call()
            texts.append(str(caught.value))
        steps(model, second, 3)
        del first, second
    apart = [
        poseidon.DistributedOptimizer(SGD(model.module.head.parameters(), lr=0.1), model),
        poseidon.DistributedOptimizer(SGD(model.module.body.parameters(), lr=0.1), model, update="server"),
    ]
    mean_loss(model, *map(own_rows, mlp_batch(9, 4 * poseidon.world_size()))).backward()
    for optimizer in apart:
        optimizer.step()
    return texts


def test_an_earlier_optimizer_has_ended() -> None:
    for texts in workers.run(2, ended):
        assert len(texts) == 4
        assert all("a later one has taken over some of its parameters: use the later one" in text for text in texts)


def wrapped_again() -> list[str]:
    """The module gets another wrapper, too. What its gradients show is still there."""
    digests = []
    for kind in ("worker", "server"):
        results = []
        for chosen in (kind, "plain"):
            module = Net()
            for number, make in enumerate((adam, momentum)):
                model = poseidon.DistributedDataParallel(module, scheme="ps")
                optimizer = distributed(make, model, chosen)
                for step in range(3):  # never cleared
                    rows = map(own_rows, mlp_batch(3 * number + step, 4 * poseidon.world_size()))
                    mean_loss(model, *rows).backward()
                    optimizer.step()
            results.append(parameters_digest(model))
        assert results[0] == results[1], kind
        digests.append(results[0])
    return digests


def test_a_later_optimizer_of_another_wrapper() -> None:
    assert all_equal(workers.run(2, wrapped_again))


def unfrozen(kind: str, keeps: bool, sets_to_none: bool) -> str:
    """The body is frozen at first, so the module is wrapped again later. `keeps`: the first optimizer lives then."""
    results = []
    for chosen in (kind, "plain"):
        module, kept = Net(), None
        module.body.requires_grad_(False)
        for number, make in enumerate((adam, momentum)):
            model = poseidon.DistributedDataParallel(module, scheme="ps")
            optimizer = distributed(make, model, chosen)
            for step in range(2):
                optimizer.zero_grad(set_to_none=sets_to_none)
                rows = map(own_rows, mlp_batch(2 * number + step, 4 * poseidon.world_size()))
                mean_loss(model, *rows).backward()
                optimizer.step()
            module.body.requires_grad_(True)
            kept, optimizer = (optimizer if keeps else None), None
            model = model if keeps else None
        del kept
        results.append(parameters_digest(module))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["worker", "server"])
def test_a_module_that_is_unfrozen_is_wrapped_again(kind: str, keeps: bool) -> None:
    for sets_to_none in (True, False):
        assert all_equal(workers.run(2, unfrozen, kind, keeps, sets_to_none))


def left_over() -> str:
    """A gradient is left where a parameter is frozen, and plain training would decay the weight."""
    model = poseidon.DistributedDataParallel(Net(), scheme="ps")
    rows = [own_rows(one) for one in mlp_batch(0, 4 * poseidon.world_size())]
    mean_loss(model, *rows).backward()
    model.zero_grad(set_to_none=False)
    model.module.body.requires_grad_(False)
    model = poseidon.DistributedDataParallel(model.module, scheme="ps")
    inner = AdamW(model.parameters(), lr=0.01)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    mean_loss(model, *rows).backward()
    text = message_of(optimizer.step, PoseidonError)
    model.module.body.zero_grad()
    optimizer.step()
    return text


def test_a_gradient_left_at_a_frozen_parameter_is_an_error_on_servers() -> None:
    for text in workers.run(2, left_over):
        assert "parameter 0 of group 0 was frozen when the model was wrapped and has a gradient" in text
