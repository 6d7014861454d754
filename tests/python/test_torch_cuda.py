"""Training on a GPU, which several workers share: as on the CPU, all replicas have the same bits, those of one process
on the whole batch within rounding. Without a GPU nothing here runs (docs/gpu.md)."""

from __future__ import annotations

import pytest
import torch

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import all_equal, assert_close, mean_loss, mlp, mlp_batch, own_rows, parameters_digest, wrap

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def train(scheme: str, dtype: torch.dtype, autocast: bool, overlap: bool, **options: str) -> str:
    torch.backends.cuda.matmul.allow_tf32 = False
    model, reference = wrap(mlp(dtype).to(DEVICE), scheme=scheme, **options)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model, reference)]
    if overlap:
        optimizers[0] = poseidon.DistributedOptimizer(optimizers[0], model)
    for step in range(4):
        inputs, targets = (part.to(DEVICE) for part in mlp_batch(step, 6 * poseidon.world_size(), dtype))
        for optimizer, part, rows in (
            (optimizers[0], model, (own_rows(inputs), own_rows(targets))),
            (optimizers[1], reference, (inputs, targets)),
        ):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                loss = mean_loss(part, *rows)
            loss.backward()
            optimizer.step()
    poseidon.barrier()
    assert_close(model.module, reference, 6e-2 if autocast else None)
    return parameters_digest(model.module.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_training_equals_one_process(scheme: str, dtype: torch.dtype) -> None:
    assert all_equal(workers.run(2, train, scheme, dtype, False, False))


@pytest.mark.parametrize("scheme", ["auto", "ps"])
def test_training_under_autocast(scheme: str) -> None:
    assert all_equal(workers.run(2, train, scheme, torch.float32, True, False))


@pytest.mark.parametrize("scheme", ["auto", "ps"])
def test_training_that_overlaps_with_the_next_forward_pass(scheme: str) -> None:
    assert all_equal(workers.run(4, train, scheme, torch.float32, False, True))


def capture() -> str:
    model = poseidon.DistributedDataParallel(mlp().to(DEVICE))
    inputs = torch.randn(4, 48, device=DEVICE)
    model(inputs).sum().backward()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(inputs).sum().backward()
    except InvalidArgument as error:
        return str(error)
    return ""


def test_a_cuda_graph_is_refused() -> None:
    for told in workers.run(2, capture):
        assert "CUDA graph" in told
