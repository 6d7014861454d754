"""What the tests of the PyTorch adapter share: models, and training beside a single-process reference."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from poseidon.schemes import SCHEMES

# Every scheme whose result has the exact sum of any gradient.
EXACT_SCHEMES = (
    "auto",
    *(name for name, one in SCHEMES.items() if not (one.lossy or one.takes_rows or one.only_one_worker)),
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers large enough for factors to pay at small batches, and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 4)).to(dtype)


def mlp_batch(step: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(rows, 48, generator=generator).to(dtype)
    return inputs, torch.randn(rows, 4, generator=generator).to(dtype)


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's equal share of the rows."""
    return tensor.chunk(poseidon.world_size())[poseidon.rank()]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for two ranks iff all bits are."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def parameters_digest(module: nn.Module) -> str:
    return digest(module.parameters())


def assert_close(actual: nn.Module, expected: nn.Module, tolerance: float | None = None) -> None:
    """Compares parameters by name."""
    wanted = dict(expected.named_parameters())
    for name, param in actual.named_parameters():
        limit = TOLERANCE[param.dtype] if tolerance is None else tolerance
        torch.testing.assert_close(param, wanted[name], rtol=limit, atol=limit, msg=lambda text, n=name: f"{n}: {text}")


def assert_gradients_close(actual: nn.Module, expected: nn.Module, tolerance: float = 2e-5) -> None:
    """Compares `.grad` by name; both may be None."""
    wanted = dict(expected.named_parameters())
    for name, param in actual.named_parameters():
        reference = wanted[name].grad
        assert (param.grad is None) == (reference is None), f"{name}: {param.grad} against {reference}"
        if reference is not None:
            torch.testing.assert_close(
                param.grad, reference, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


def run_beside_torch(world_size: int, store: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` in processes of their own, which have poseidon's job and torch's default group of one size.

    `store` is a file that is not there yet. Raises WorkerError as `workers.run`.
    """
    answers = workers.run_fresh(world_size, _beside_torch, str(store), function, *args, GLOO_SOCKET_IFNAME="lo")
    failures = [answer for answer in answers if answer is None or isinstance(answer, workers.Failure)]
    if failures:
        raise workers.WorkerError("\n".join("ended" if one is None else one.trace for one in failures))
    return answers


def _beside_torch(store: str, function: Callable[..., Any], *args: Any) -> Any:
    poseidon.init(small_bytes=256)
    size = poseidon.world_size()
    # It ends with the process: gloo's thread frees the tensors that it sent under a lock which the group's destructor
    # waits for with the GIL held, and freeing what Python has seen takes the GIL (seen with torch 2.13).
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=poseidon.rank(), world_size=size)
    return function(*args)


def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - targets).square().mean()  # torch 2.4 has no mse_loss of 16 bits on CPUs


def wrap(module: nn.Module, **options: Any) -> tuple[poseidon.DistributedDataParallel, nn.Module]:
    """The module under the wrapper, and an unwrapped copy made before."""
    reference = copy.deepcopy(module)
    return poseidon.DistributedDataParallel(module, **options), reference


Batch = Callable[[int], tuple[torch.Tensor, ...]]
Loss = Callable[..., torch.Tensor]


def compare_gradients(
    module: nn.Module, batch: Batch, loss: Loss, steps: int = 3, tolerance: float = 2e-5, **options: Any
) -> tuple[str, list[str]]:
    """After each of `steps` backward passes the gradients must be those of the whole batch.

    Returns a digest of all gradients and the schemes of the last step by layer ("name scheme").
    """
    model, reference = wrap(module, **options)
    digests = []
    for step in range(steps):
        tensors = batch(step)
        model.zero_grad()
        reference.zero_grad()
        loss(model, *map(own_rows, tensors)).backward()
        loss(reference, *tensors).backward()
        assert_gradients_close(model.module, reference, tolerance)
        digests.append(digest(p.grad for p in module.parameters() if p.grad is not None))
    return " ".join(digests), [f"{layer.name} {layer.scheme}" for layer in model.synchronization_stats()]


def all_equal(answers: list[Any]) -> bool:
    return all(answer == answers[0] for answer in answers)


def shard(step: int) -> list[torch.Tensor]:
    """This rank's rows of one step's batch for `mlp`, four for each rank."""
    return [own_rows(tensor) for tensor in mlp_batch(step, 4 * poseidon.world_size())]


def message_of(action: Callable[[], Any], kind: type[Exception] = InvalidArgument) -> str:
    """What the error says that `action` must raise."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)
