"""With one worker nothing is exchanged, and wrong arguments are named before anything is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import poseidon
import poseidon.torch as api
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown, by_code


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    api.init()
    yield
    api.shutdown()


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))


@pytest.mark.usefixtures("job")
def test_one_worker_trains_as_the_module_itself() -> None:
    plain, inner = module(), module()
    model = api.DistributedDataParallel(inner)
    inputs = torch.randn(5, 20)
    for part in (plain, model):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        with model.no_sync(), model.join():
            part(inputs).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), inner.parameters(), strict=True))
    assert "forward" not in inner[0].__dict__
    assert api.rank() == 0
    assert api.world_size() == 1
    api.barrier()
    api.broadcast(inputs)
    assert model.synchronization_stats() == []
    assert {row.scheme for row in model.plan()} == {"local"}


@pytest.mark.usefixtures("job")
def test_one_worker_adds_little_to_a_step() -> None:
    """The wrapper's whole work per step, without the module's, against the 500 µs that 1 % of 50 ms are."""
    inner = nn.Identity()
    inner.weight = nn.Parameter(torch.ones(1))
    model = api.DistributedDataParallel(inner)
    inputs = torch.ones(1)

    def seconds(part: nn.Module) -> float:
        begin = time.perf_counter()
        for _ in range(100):
            part(inputs)
        return (time.perf_counter() - begin) / 100

    extra = statistics.median(seconds(model) for _ in range(9)) - statistics.median(seconds(inner) for _ in range(9))
    assert extra < 250e-6


def test_before_init_and_after_shutdown() -> None:
    for call in (api.rank, api.world_size, api.barrier, lambda: api.DistributedDataParallel(module())):
        with pytest.raises(ShutDown, match="init"):
            call()
    api.shutdown()


@pytest.mark.usefixtures("job")
def test_init_twice() -> None:
    with pytest.raises(InvalidArgument, match="twice"):
        api.init()


def test_init_with_half_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidArgument, match="WORLD_SIZE"):
        api.init()
    with pytest.raises(ShutDown):
        api.rank()


class Eighths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))


REFUSED = [
    (lambda: Eighths(), {}, "parameter table has dtype torch.float8_e4m3fn, .* convert it, or set requires_grad=False"),
    (lambda: nn.ReLU(), {}, "at least one"),
    (module, {"scheme": "fastest"}, "'fastest'.*sfb"),
    (module, {"scheme": {"missing.*": "ps"}}, "missing"),
    (module, {"scheme": {"0.weight": "best"}}, "'best'"),
    (module, {"mixed_precision": object()}, "mixed_precision"),
    (module, {"process_group": object()}, "process_group"),
    (module, {"device_ids": [0]}, "device_ids"),
]


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("build", "options", "words"), REFUSED)
def test_refused(build: type, options: dict, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        api.DistributedDataParallel(build(), **options)


@pytest.mark.usefixtures("job")
def test_torchs_arguments_are_accepted() -> None:
    api.DistributedDataParallel(
        module(),
        None,
        None,
        broadcast_buffers=False,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=25,
        process_group=None,
    )


@pytest.mark.usefixtures("job")
def test_broadcast_refuses_a_root_that_is_no_rank() -> None:
    with pytest.raises(InvalidArgument, match="root is 1"):
        api.broadcast(torch.ones(1), root=1)


@pytest.mark.parametrize(
    ("code", "base"), [("timeout", TimeoutError), ("invalid_argument", ValueError), ("peer_lost", RuntimeError)]
)
def test_errors_by_code(code: str, base: type[Exception]) -> None:
    kind = by_code(code)
    assert kind.code == code
    assert issubclass(kind, PoseidonError)
    assert issubclass(kind, base)


def test_unknown_code_and_version() -> None:
    assert by_code("something new") is PoseidonError
    assert poseidon.__version__
