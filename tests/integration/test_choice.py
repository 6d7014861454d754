"""The choice by time on shaped links: layers change their scheme when a port is cut, everywhere in the same step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.bench.hosts.fleet import Fleet, Place, places_of, start_fleet
from poseidon.launch import free_port
from poseidon.testbed import Testbed, missing_requirements

pytestmark = pytest.mark.skipif(bool(missing_requirements()), reason="shaped hosts need root and iproute2")

HOSTS = 3
WIDTH = 768
ROWS = 192  # factors have 3/4 of the bytes of dense gradients, but their products take longer than a fast port
TIMEOUT_S = 60.0
MOST_STEPS = 96


class Worker:
    def __init__(self, places: list[Place], rank: int, port: int) -> None:
        torch.set_num_threads(1)
        poseidon.init(
            rank=rank,
            world_size=HOSTS,
            master_addr=places[0].address,
            master_port=port,
            timeout=TIMEOUT_S,
            compute_threads=1,
            transport="tcp",
            secret="of this test alone",
        )
        torch.manual_seed(0)
        self.model = poseidon.DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.step = 0

    def train(self, steps: int) -> tuple[list[dict[str, str]], list[bytes]]:
        """The schemes of the weights and the bits of a parameter after every step."""
        schemes, bits = [], []
        for _ in range(steps):
            inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self.step * 10 + poseidon.rank()))
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.step += 1
            last = self.model.synchronization_stats()
            schemes.append({row.name: row.scheme for row in last if row.name.endswith("weight")})
            bits.append(self.model.module[0].weight.detach()[:4].numpy().tobytes())
        return schemes, bits

    def reasons(self) -> list[str]:
        return [str(entry["reason"]) for entry in self.model.choices()]

    def close(self) -> None:
        del self.model, self.optimizer
        poseidon.shutdown()


def train_until(fleet: Fleet, reached: Callable[[set[str]], bool]) -> None:
    """Trains until the schemes of the weights are as wanted. They are the same on all ranks, as are the parameters."""
    for _ in range(MOST_STEPS // 8):
        answers = fleet.call_same("train", 8, timeout_seconds=TIMEOUT_S)
        assert all(answer == answers[0] for answer in answers), "ranks differ"
        if reached(set(answers[0][0][-1].values())):
            return
    raise AssertionError(f"{answers[0][0][-1]}: {fleet.call_same('reasons', timeout_seconds=TIMEOUT_S)[0]}")


def test_a_port_that_is_cut_changes_the_schemes_of_all_ranks() -> None:
    torch.set_num_threads(1)  # the workers are forked
    with Testbed(HOSTS, "10gbit") as testbed:
        places, port = places_of(testbed), free_port()
        with start_fleet(places, lambda rank: Worker(places, rank, port)) as fleet:
            schemes, _ = fleet.call_same("train", 2, timeout_seconds=TIMEOUT_S)[0]
            assert set(schemes[1].values()) == {"sfb"}, "factors have fewer bytes"
            # As a rule not all: one layer's products are made while the port carries another's gradient.
            train_until(fleet, lambda taken: "ps" in taken)
            testbed.set_rate(1, "50mbit")
            train_until(fleet, lambda taken: taken == {"sfb"})
            (reasons, *_) = fleet.call_same("reasons", timeout_seconds=TIMEOUT_S)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    assert "bit on a port" in reasons[0]
