"""Models of which a function is compiled, and not the model; and checkpoints that are made again in another mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from torch_cases import all_equal, digest, own_rows

BACKEND = "aot_eager"


class Compiled(nn.Module):
    """Compiles a method, a closure, its own forward or a part's; or its method later, in mid-run."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.core: Any = self._core
        if what == "method":
            self.core = torch.compile(self._core, backend=BACKEND)
        elif what == "closure":
            self.core = torch.compile(lambda x: torch.tanh(self.inner(x)), backend=BACKEND, fullgraph=True)
        elif what == "forward":
            self.forward = torch.compile(self.forward, backend=BACKEND)  # type: ignore[method-assign]

    def _core(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.core(x))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def trained(what: str, alone: bool) -> nn.Module:
    module = Compiled(what)
    model: Any = module if alone else poseidon.DistributedDataParallel(module)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    if not alone:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    for step in range(4):
        if what == "late" and step == 2:
            module.core = torch.compile(module._core, backend=BACKEND)
        optimizer.zero_grad()
        model(batch(step) if alone else own_rows(batch(step))).square().mean().backward()
        optimizer.step()
    return module


def compiled_parts() -> list[str]:
    results = []
    for what in ("method", "closure", "forward", "late"):
        module = trained(what, alone=False)
        torch.testing.assert_close(list(module.parameters()), list(trained("nothing", alone=True).parameters()))
        results.append(digest(module.parameters()))
    return results


def test_compiled_functions_of_a_model_with_overlap() -> None:
    assert all_equal(workers.run(2, compiled_parts))


class Featured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(300, 300), nn.Tanh())
        self.head = nn.Linear(300, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def past_the_wrapper() -> str:
    """Features are taken past the wrapper, under a checkpoint, and their pass is made again in one that exchanges."""
    model, reference = poseidon.DistributedDataParallel(Featured()), Featured()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step in range(3):
        inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(step))
        for (outer, inner, x), optimizer in zip(
            [(model, model.module, own_rows(inputs)), (reference, reference, inputs)], optimizers, strict=True
        ):
            features = inner.features(x)
            optimizer.zero_grad()
            (outer(x).square().mean() + features.mean()).backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()), rtol=1e-4, atol=1e-5)
    return digest(model.parameters())


def test_a_checkpoint_past_the_wrapper_is_made_again_alike() -> None:
    assert all_equal(workers.run(2, past_the_wrapper))
