"""The check of the replicas: what differs on one rank ends the job and is named, and nothing else does."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.adapter import replica_check
from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument, Mismatch, PoseidonError
from poseidon.options import resolve
from torch_cases import mean_loss, message_of, mlp, shard

UPDATES = ("plain", "worker", "server")


class Training:
    """A model and its optimizer, trained step by step."""

    def __init__(self, update: str, module: nn.Module | None = None, momentum: float = 0.9, **options: Any) -> None:
        self.net = mlp() if module is None else module
        self.model = poseidon.DistributedDataParallel(self.net, **options)
        inner = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.05, momentum=momentum)
        self.optimizer: Any = inner
        if update != "plain":
            self.optimizer = poseidon.DistributedOptimizer(inner, self.model, update=update)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        mean_loss(self.model, *shard(number)).backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for number in range(count):
            self.step(number)

    def flip_a_bit(self, name: str) -> None:
        """On rank 1 alone, without a trace that autograd or a watcher could see."""
        if isinstance(self.optimizer, poseidon.DistributedOptimizer):
            self.optimizer.synchronize()
        if poseidon.rank() == 1:
            self.net.get_parameter(name).data.view(-1).view(torch.int32)[3] ^= 1


def flipped(update: str, name: str) -> tuple[str, str]:
    training = Training(update)
    training.steps(3)
    training.flip_a_bit(name)
    text = message_of(lambda: training.steps(2), Mismatch)
    return text, message_of(lambda: training.step(5), PoseidonError)


@pytest.mark.parametrize("update", UPDATES)
def test_a_flipped_bit_is_found_in_the_next_step_and_named(update: str) -> None:
    for text, again in workers.run(2, flipped, update, "2.weight", replica_check=1):
        assert "the replicas differ after step 3: parameter 2.weight" in text
        assert "rank 0 and rank 1" in text
        assert "equal after step 2" in text
        assert "Usual causes" in text
        assert "2.weight" in again or update == "server", "the model goes on"


def flipped_every() -> tuple[int, str]:
    training = Training("plain")
    training.steps(2)
    training.flip_a_bit("0.bias")
    for number in range(9):
        try:
            training.step(number)
        except Mismatch as difference:
            return number, str(difference)
    return -1, ""


def test_with_n_it_is_found_within_n_steps_and_the_odd_rank_is_named() -> None:
    for number, text in workers.run(3, flipped_every, replica_check=4):
        assert number <= 4
        assert "parameter 0.bias has not the same values on rank 1 and on the others" in text


def loaded_on_one_rank() -> str:
    training = Training("plain")
    other = mlp()
    with torch.no_grad():
        other[2].bias.add_(1)
    if poseidon.rank() == 0:
        training.net.load_state_dict(other.state_dict())
    return message_of(lambda: training.steps(5), Mismatch)


def test_by_default_parameters_that_one_rank_has_loaded_are_found_after_two_steps() -> None:
    for text in workers.run(2, loaded_on_one_rank):
        assert "after step 2: parameter 2.bias" in text
        assert "1 of 6 parameters" in text


def learning_rate_of_its_own() -> str:
    training = Training("plain")
    training.steps(3)
    training.optimizer.param_groups[0]["lr"] *= 1 + poseidon.rank()
    return message_of(lambda: training.steps(3), Mismatch)


def frozen_loaded() -> str:
    net = mlp()
    net[0].requires_grad_(False)
    training = Training("plain", net)
    if poseidon.rank() == 1:
        net[0].weight.data += 1
    return message_of(lambda: training.steps(3), Mismatch)


def test_a_learning_rate_and_a_frozen_parameter_of_one_rank_are_found() -> None:
    for text in workers.run(2, learning_rate_of_its_own, replica_check=1):
        assert "after step 4: parameter 0.weight" in text
    for text in workers.run(2, frozen_loaded, replica_check=1):
        assert "after step 1: parameter 0.weight" in text


def averaged(outer: bool) -> list[str]:
    """LocalSGD: replicas may differ between averages, and not after them."""
    net = mlp()
    net[0].requires_grad_(False)
    inner = torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.05)
    optimizer = poseidon.LocalSGD(net, inner, 2, outer=poseidon.OuterNesterov() if outer else None)

    def steps(count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            mean_loss(net, *shard(number)).backward()
            optimizer.step()

    steps(5)
    if poseidon.rank() == 1:
        net[0].weight.data.view(-1).view(torch.int32)[3] ^= 1
    return [message_of(lambda: steps(1), Mismatch), message_of(lambda: steps(2), Mismatch)]


@pytest.mark.parametrize("outer", [False, True])
def test_replicas_are_compared_right_after_an_average(outer: bool) -> None:
    for first, again in workers.run(2, averaged, outer, replica_check=1):
        assert "the replicas differ after average 3: parameter 0.weight" in first
        assert "equal after average 2" in first
        assert "0.weight" in again


class Local(nn.Module):
    """A parameter that is each rank's own, an embedding that forward changes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.Parameter(torch.ones(8))
        self.table = nn.Embedding(16, 48, max_norm=0.5)
        self.norm = nn.BatchNorm1d(48)
        self.rest = mlp()
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(inputs)) + 4 * poseidon.rank()
        out: torch.Tensor = self.rest(self.norm(inputs + self.table(rows))) + self.own.sum()
        return out


def what_may_differ() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training("plain", Local(), broadcast_buffers=False)
    training.net.own.data += poseidon.rank()  # type: ignore[operator]
    training.steps(4)


def every_loop() -> None:
    """Accumulation, a step that is left out, two models in turn, evaluation on one rank, uneven batches."""
    one, two = Training("plain", momentum=0), Training("worker")
    for number in range(4):
        with one.model.no_sync():
            mean_loss(one.model, *shard(number)).backward()
        mean_loss(one.model, *shard(number)).backward()
        if number != 2:
            one.optimizer.step()
            one.optimizer.zero_grad()
        two.step(number)
        if poseidon.rank() == 0:
            with torch.no_grad():
                one.model(shard(number)[0])
    with one.model.join():
        for number in range(1 + 2 * poseidon.rank()):
            one.step(number)
    one.steps(3)


def test_what_may_differ_is_left_alone() -> None:
    workers.run(2, what_may_differ, replica_check=1)
    workers.run(2, every_loop, replica_check=1)


def rounded() -> tuple[list[str], str]:
    """Ranks that compute differently: within rounding there is one warning, beyond it the error."""
    training = Training("plain")
    training.steps(2)
    processor = f"processor {poseidon.rank()}"
    surroundings = mock.patch("poseidon.torch.model.replica.processor_name", return_value=processor)
    with surroundings, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.flip_a_bit("2.weight")
        training.steps(3)
        if poseidon.rank() == 1:
            training.net.get_parameter("2.weight").data[0, 0] += 0.5
        text = message_of(lambda: training.steps(2), Mismatch)
    return [str(one.message) for one in caught if "rounding" in str(one.message)], text


def test_ranks_that_round_differently_warn_once_and_differ_only_by_more() -> None:
    for told, text in workers.run(2, rounded, replica_check=1):
        assert len(told) == 1
        assert "parameter 2.weight" in told[0]
        assert "processor 1" in told[0]
        assert "the replicas differ after step 5" in text


def test_the_option_takes_auto_off_and_numbers() -> None:
    assert resolve(replica_check="off").replica_check == "off"
    assert resolve(replica_check=7).replica_check == resolve(replica_check="7").replica_check == 7
    assert resolve().replica_check == "auto"
    with pytest.raises(InvalidArgument, match="auto, off, or a whole number"):
        resolve(replica_check="often")
    with pytest.raises(InvalidArgument, match="auto, off, or a whole number"):
        resolve(replica_check=0)


def test_the_check_is_left_out_where_ranks_may_be_at_different_steps() -> None:
    together = resolve(world_size=2, rank=0, master_addr="127.0.0.1", master_port=29500)

    def check_of(**options: str) -> replica_check.ReplicaCheck | None:
        settings = together.replace(**options)
        return replica_check.replica_check(settings, Features.of(settings))

    assert check_of() is not None
    assert check_of(stragglers="drop") is None
    assert check_of(consistency="ssp") is None
    assert check_of(replica_check="off") is None


def layouts() -> str:
    """Replicas that are equal, in memory that is not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    training = Training("plain", net)
    if poseidon.rank() == 1:
        other = copy.deepcopy(net[1].weight.data)
        net[1].weight.data = other.to(memory_format=torch.channels_last)
    training.steps(3)
    return "equal"


def test_the_digest_is_of_the_values_not_of_their_layout() -> None:
    assert workers.run(2, layouts, replica_check=1) == ["equal"] * 2


def climb(training: Training, count: int) -> None:
    """SAM with each rank's own ascent: a step begins with other parameters on each rank, and ends with equal ones."""
    params = list(training.net.parameters())
    for number in range(count):
        with training.model.no_sync():
            mean_loss(training.model, *shard(number)).backward()
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.add_(param.grad, alpha=0.05)
        training.optimizer.zero_grad()
        mean_loss(training.model, *shard(number)).backward()
        with torch.no_grad():
            for param, before in zip(params, kept, strict=True):
                param.copy_(before)
        training.optimizer.step()
        training.optimizer.zero_grad()


def sums_of(training: Training) -> list[float]:
    return [param.double().sum().item() for param in training.net.parameters()]


def each_rank_climbs(loop: str, flips: bool) -> list[float]:
    training = Training(loop)
    climb(training, 12)
    if flips:
        training.flip_a_bit("0.bias")
        assert "parameter 0.bias has not the same" in message_of(lambda: training.steps(3), Mismatch)
        return []
    return sums_of(training)


@pytest.mark.parametrize("loop", ["plain", "worker"])
@pytest.mark.parametrize(("check", "flips"), [("auto", False), (1, False), (1, True)])
def test_what_a_program_takes_back_before_its_update_is_no_difference(loop: str, check: Any, flips: bool) -> None:
    first, second = workers.run(2, each_rank_climbs, loop, flips, replica_check=check)
    assert first == second


def climbs_with_a_replacement(climbed: int) -> list[float]:
    """Rank 1's check knows nothing of what came before, as that of a process that takes a lost one's place."""
    training = Training("plain")
    climb(training, climbed)
    trained, sync = training.model.trained_model(), training.model.synchronizer
    assert sync is not None
    if poseidon.rank() == 1:
        sync.replica = trained._make_replica(sync)
    sync.replica.connect(trained.context.control)
    climb(training, 4)
    return sums_of(training)


@pytest.mark.parametrize("climbed", [2, 5])
def test_a_new_membership_begins_the_check_anew_on_all_ranks(climbed: int) -> None:
    first, second = workers.run(2, climbs_with_a_replacement, climbed, replica_check=1)
    assert first == second
