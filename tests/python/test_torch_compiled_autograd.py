"""torch's compiled autograd runs hooks, but nothing at the end of backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from torch_cases import assert_close, mean_loss, mlp, mlp_batch, own_rows

compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
if not hasattr(compiled_autograd, "in_compiled_autograd_region"):
    pytest.skip("this torch does not say when compiled autograd runs", allow_module_level=True)


def backward(loss: torch.Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def compiled() -> None:
    model, alone = poseidon.DistributedDataParallel(mlp()), mlp()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, alone)]
    for step in range(3):
        inputs, labels = mlp_batch(step, 6)
        backward(mean_loss(model, own_rows(inputs), own_rows(labels)))
        mean_loss(alone, inputs, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model.module, alone)


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def left_out() -> str:
    model = poseidon.DistributedDataParallel(Leaves())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model(torch.ones(3, 4)).sum())
    with pytest.raises(poseidon.PoseidonError) as caught:
        optimizer.step()
    return str(caught.value)


def both() -> str:
    poseidon.init()
    compiled()
    return left_out()


def test_compiled_backward_passes_exchange_or_say_what_they_leave_out() -> None:
    for text in workers.run_fresh(2, both):
        assert "2 were left out, unused.bias first" in text
        assert "compiled_autograd" in text
