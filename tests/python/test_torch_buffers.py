"""Buffers on their way from rank 0: never into another buffer, whatever a rank has registered, and of any type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import Mismatch, PoseidonError
from torch_cases import all_equal, message_of
from waiting import wait_until


class Statistics(nn.Module):
    """Running statistics, and a part before them that may get buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cache = nn.Module()
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs))  # type: ignore[no-any-return]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.cache.register_buffer(name, tensor, persistent=False)


def step(model: nn.Module) -> None:
    torch.manual_seed(poseidon.rank())
    model(torch.randn(16, 8) + 5).square().mean().backward()


def late(on_rank: int, change: Callable[[Statistics], None]) -> tuple[str, float]:
    net = Statistics()
    model = poseidon.DistributedDataParallel(net)
    step(model)
    if poseidon.rank() == on_rank:
        change(net)
    before = net.norm.running_mean.clone()  # type: ignore[union-attr]
    try:
        step(model)
        step(model)
        text = ""
    except PoseidonError as error:
        text = str(error)
    touched = (net.norm.running_mean - before).abs().max().item() if poseidon.rank() == 1 else 0.0  # type: ignore
    return text, touched


def registers(net: Statistics) -> None:
    net.put("freq", torch.arange(16.0))


def grows(net: Statistics) -> None:
    net.norm.running_mean = torch.zeros(9)  # type: ignore[assignment]


@pytest.mark.parametrize(("on_rank", "change", "named"), [(1, registers, "cache.freq"), (0, registers, "cache.freq")])
def test_a_buffer_that_one_rank_registers_late_is_named(
    on_rank: int, change: Callable[[Statistics], None], named: str
) -> None:
    for text, touched in workers.run_fresh(2, in_job, late, on_rank, change):
        assert f"rank {on_rank} has {named} (shape (16,), float32), which rank {1 - on_rank} has not" in text
        assert touched < 1e-6, "another buffer was overwritten"


def test_a_buffer_that_grows_on_one_rank_is_named() -> None:
    for text, _ in workers.run_fresh(2, in_job, late, 1, grows):
        assert "norm.running_mean" in text


def in_job(function: Callable[..., Any], *args: Any) -> Any:
    poseidon.init()
    try:
        return function(*args)
    finally:
        poseidon.shutdown()


def all_change() -> list[float]:
    """Every rank registers the same buffer late: from then on it is sent, too."""
    net = Statistics()
    model = poseidon.DistributedDataParallel(net)
    for number in range(4):
        step(model)
        if number == 1:
            net.put("freq", torch.full((3,), float(poseidon.rank())))
    with torch.no_grad():
        model(torch.randn(4, 8))
    return [*net.norm.running_mean.tolist(), *net.cache.freq.tolist()]  # type: ignore


def test_what_all_ranks_register_late_is_sent() -> None:
    answers = workers.run(2, all_change)
    assert all_equal([answer[-3:] for answer in answers])
    assert answers[1][-3:] == [0.0] * 3


def own_buffers() -> tuple[int, int]:
    """Without sync, buffers may be what they like."""
    net = Statistics()
    if poseidon.rank() == 1:
        net.put("freq", torch.arange(16.0).to_sparse())
    model = poseidon.DistributedDataParallel(net, broadcast_buffers=False)
    step(model)
    if poseidon.rank() == 0:
        net.put("other", torch.zeros(2))
    step(model)
    return len(list(net.buffers())), int(net.norm.num_batches_tracked)  # type: ignore[arg-type]


def test_without_sync_a_difference_is_no_error() -> None:
    assert workers.run(2, own_buffers) == [(4, 2), (4, 2)]


def odd_ones() -> list[Any]:
    """What travels: each rank then has rank 0's values, in its own memory."""
    rank = poseidon.rank()
    with torch.inference_mode():
        inference = torch.full((3,), float(rank))
    buffers = {
        "expanded": torch.tensor([[float(rank)]]).expand(3, 4),
        "inference": inference,
        "complex": torch.full((2,), complex(rank, 1)),
        "conj": torch.full((2,), complex(rank, 1)).conj(),
        "bool": torch.tensor([rank == 0, False]),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(rank),
        "float8": torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
        "strided": torch.full((3, 4), float(rank)).t(),
        "uint16": torch.tensor([rank], dtype=torch.uint16),
    }
    net = Statistics()
    for name, buffer in buffers.items():
        net.put(name, buffer)
    model = poseidon.DistributedDataParallel(net)
    step(model)
    if rank == 0:
        buffers["scalar"].fill_(7)
    step(model)
    return [buffer.clone().resolve_conj().to(torch.complex64).tolist() for buffer in buffers.values()]


def test_buffers_of_odd_types_travel() -> None:
    first, second = workers.run(2, odd_ones)
    assert first == second
    assert first[6] == 7


def refused() -> list[str]:
    texts = []
    for name, buffer in {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "lazy": nn.parameter.UninitializedBuffer(),
    }.items():
        net = Statistics()
        net.put(name, buffer)
        texts.append(message_of(lambda net=net: poseidon.DistributedDataParallel(net)))
        net._ddp_params_and_buffers_to_ignore = [f"cache.{name}"]  # type: ignore[assignment]
        step(poseidon.DistributedDataParallel(net))
    return texts


def test_buffers_that_cannot_travel_are_named() -> None:
    for texts in workers.run(2, refused):
        assert [name for name, text in zip(["sparse", "quantized", "meta", "lazy"], texts, strict=True) if name in text]
        assert all("buffer cache." in text for text in texts)


def alone(folder: Path) -> None:
    """Rank 0 evaluates two models, one after the other and again, and rank 1 begins when it has done so."""
    models = []
    for _ in range(2):
        net = Statistics()
        net.put("large", torch.ones(10 << 20))  # 40 MiB
        models.append(poseidon.DistributedDataParallel(net))
    for number in range(2):
        poseidon.barrier()
        if poseidon.rank() == 0:
            for model in (*models, *models):
                with torch.no_grad():
                    model(torch.zeros(2, 8))
            (folder / str(number)).touch()
        else:
            wait_until((folder / str(number)).exists, "rank 0, which waits for this one", 20)
        for model in models:
            step(model)


def test_rank_0_evaluates_alone_with_buffers_of_any_size(tmp_path: Path) -> None:
    workers.run(2, alone, tmp_path)


def buffer_hooks() -> str:
    """A list of buffers that differs between the ranks is refused, too."""
    model = poseidon.DistributedDataParallel(Statistics())
    sizes = [torch.zeros(3 + poseidon.rank())]
    return message_of(lambda: model._default_broadcast_coalesced(sizes), Mismatch)


def test_buffers_that_a_hook_sends_are_compared() -> None:
    for text in workers.run(2, buffer_hooks):
        assert "shape (3,)" in text
        assert "shape (4,)" in text
