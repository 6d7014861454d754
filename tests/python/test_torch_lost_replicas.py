"""Replicas of sharded models, each in a world of its own, of which some are lost."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.options import between_replicas, resolve, within_replica
from poseidon.torch.process.context import context
from recovery_cases import Fault
from replica_cases import Replicas, killed, make_optimizer, sharded_network, train
from sharded_cases import batch, loss_of, network

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

STEPS = 6
PHASES = ("start", "set-up", "forward", "backward", "before step", "after step", "between")
REJOIN = {"POSEIDON_ON_FAILURE": "rejoin"}


def _trained(folder: Path, kind: str, faults: list[Fault], count: int = 2, shards: int = 2, **more: str) -> list[Any]:
    """What the ranks of each replica say at the end."""
    folder.mkdir()
    return Replicas(folder, count, shards, environment={**REJOIN, **more}).run(train, kind, STEPS, faults)


def _bits(answers: list[Any]) -> Any:
    """By shard; the replicas have the same."""
    found = [[(one["parameters"], one["state"]) for one in replica] for replica in answers]
    assert all(replica == found[0] for replica in found)
    return found[0]


@pytest.mark.parametrize("on_failure", ["rejoin", "abort"])
def test_replicas_train_as_one_process(tmp_path: Path, on_failure: str) -> None:
    answers = _trained(tmp_path / "job", "sgd clip", [], shards=3, POSEIDON_ON_FAILURE=on_failure)
    _bits(answers)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = batch(step).repeat(2, 1).chunk(6)
        (sum(loss_of(model, some) for some in rows) / len(rows)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**step
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(torch.tensor(answers[0][0]["whole"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fault", "options"),
    [
        ("sgd clip", killed(1, 0, 3, "backward"), {}),
        ("adam", killed(0, 1, 3, "after step"), {"POSEIDON_CODING": "on"}),
        ("adam overlap", killed(0, 0, 3, "forward"), {}),
        ("sgd overlap clip bf16", killed(1, 1, 3, "backward", delay=0.05), {}),
    ],
)
def test_a_lost_replica_is_replaced(tmp_path: Path, kind: str, fault: Fault, options: dict[str, str]) -> None:
    undisturbed = _bits(_trained(tmp_path / "undisturbed", kind, [], **options))
    disturbed = _trained(tmp_path / "disturbed", kind, [fault], **options)
    assert _bits(disturbed) == undisturbed
    lost = fault.rank // 100
    assert [replaced for _, _, replaced in disturbed[1 - lost][0]["history"]] == [[lost]]


def test_one_that_is_lost_while_until_completes(tmp_path: Path) -> None:
    """One shard's barrier passes, and another one's does not."""
    fault = killed(1, 1, STEPS, "between")
    undisturbed = _bits(_trained(tmp_path / "undisturbed", "adam overlap", []))
    (tmp_path / "disturbed").mkdir()
    replicas = Replicas(tmp_path / "disturbed", 2, 2, environment=REJOIN, ends_others_after_s=0.5)
    assert _bits(replicas.run(train, "adam overlap", STEPS, [fault])) == undisturbed
    assert replicas.restarted == 1


def test_one_that_is_lost_while_it_is_taken_in(tmp_path: Path) -> None:
    faults = [killed(1, 0, 3, "backward"), killed(1, 0, 2, "adopt")]  # 2: the generation
    undisturbed = _bits(_trained(tmp_path / "undisturbed", "sgd", []))
    (tmp_path / "disturbed").mkdir()
    replicas = Replicas(tmp_path / "disturbed", 2, 2, environment=REJOIN)
    assert _bits(replicas.run(train, "sgd", STEPS, faults)) == undisturbed
    assert replicas.restarted == 2


@pytest.mark.parametrize("number", range(4))
def test_replicas_are_lost_at_random(tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    kind = draw.choice(("sgd", "adam", "adam overlap", "sgd overlap bf16"))
    count, shards = draw.choice(((2, 2), (3, 2), (2, 3)))

    def fault() -> Fault:
        place = draw.randrange(count), draw.randrange(shards), draw.randrange(STEPS - 3)  # before others have ended
        return killed(*place, draw.choice(PHASES), delay=draw.choice((0, 0.01, 0.05)))

    undisturbed = _bits(_trained(tmp_path / "undisturbed", kind, [], count, shards))
    assert _bits(_trained(tmp_path / "disturbed", kind, [fault() for _ in range(3)], count, shards)) == undisturbed


def test_the_ranks_of_a_replica_leave_after_the_same_step(tmp_path: Path) -> None:
    """SIGTERM to one of them asks all."""
    undisturbed = _bits(_trained(tmp_path / "undisturbed", "adam overlap", []))
    asked = killed(1, 1, 3, "forward", signal=signal.SIGTERM)
    answers = _trained(tmp_path / "asked", "adam overlap", [asked])
    assert _bits(answers) == undisturbed
    assert [event[:1] + event[2:] for event in answers[0][0]["history"]] == [[4, [1]]]
    assert {one["steps_made"] for one in answers[1]} == {STEPS - 4}


def test_the_others_go_on_without_a_lost_replica(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    replicas = Replicas(tmp_path / "job", 3, 2, restarts=0, environment={"POSEIDON_ON_FAILURE": "shrink"})
    answers = replicas.run(train, "adam overlap", STEPS, [killed(1, 0, 3, "forward")])
    assert answers[1] == [None, None]
    _bits([answers[0], answers[2]])
    # A step of which some updates were made when the replica was lost is made again by those who are left.
    for one in (*answers[0], *answers[2]):
        assert (one["sizes"][:2], one["sizes"][-2:]) == ([3, 3], [2, 2])


def _with_collectives(folder: Path, faults: list[Fault]) -> list[float]:
    """What a program computes by Poseidon's collectives in attempts of which some become void."""
    from replica_cases import dying

    dist.init_process_group("gloo")
    with dying(folder, faults) as dies:
        poseidon.init()
        model = sharded_network()
        wrapper = poseidon.DistributedDataParallel(model)
        optimizer = make_optimizer("sgd", model, wrapper)
        recovery = poseidon.Recovery(wrapper, optimizer, seed=7)
        means: list[float] = []
        while recovery.until(STEPS):
            with recovery.attempt():
                optimizer.zero_grad()
                loss = loss_of(wrapper, batch(recovery.step).chunk(2)[poseidon.rank()])
                loss.backward()
                dies.reached("before step", recovery.step)
                optimizer.step()
                mean = poseidon.all_reduce(loss.detach(), "mean")
                poseidon.barrier()
                dist.all_reduce(mean)  # in which the ranks of a replica wait for each other
                assert len(poseidon.all_gather(mean)) == 2
            means[recovery.step - 1 :] = [mean.item()]
    poseidon.shutdown()
    return means


def test_collectives_of_a_void_attempt_keep_nobody_waiting(tmp_path: Path) -> None:
    answers = Replicas(tmp_path, 2, 2, environment=REJOIN).run(_with_collectives, [killed(1, 0, 3, "before step")])
    assert len(answers[0][0]) == STEPS
    assert answers[0][0] == answers[0][1]
    assert answers[0][0][-2:] == answers[1][0][-2:]


# What cannot be.


def _refused(folder: Path, what: str) -> str:
    """What the program is told that uses a replica so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    poseidon.init()
    model: Any = network()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    if what != "whole":
        fully_shard(model, mesh=half if what == "half" else mesh)
    try:
        if what == "local":
            local = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
            poseidon.Recovery(local, directory=folder)
        elif what == "mesh":
            poseidon.DistributedDataParallel(model, device_mesh=mesh)
        elif what == "unrecovered":
            loss_of(poseidon.DistributedDataParallel(model), batch(0)).backward()
        else:
            wrapper = poseidon.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            more: dict[str, Any] = {"directory": folder} if what == "directory" else {"undo": what != "undo"}
            poseidon.Recovery(wrapper, optimizer, **more)
    except PoseidonError as error:
        return str(error)
    finally:
        context().leave()
    return ""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("whole", "is not sharded over all 2 ranks of the replica"),
        ("half", "is not sharded over all 2 ranks of the replica"),
        ("mesh", "leave process_group and device_mesh out"),
        ("local", "LocalSGD exclude each other"),
        ("directory", "save by torch.distributed.checkpoint"),
        ("undo", "undo=False, and the shards of a replica"),
        ("unrecovered", "training runs in attempts of poseidon.Recovery"),
    ],
)
def test_what_a_replica_cannot_be(tmp_path: Path, what: str, expected: str) -> None:
    [(one, other)] = Replicas(tmp_path, 2, 2, environment=REJOIN, only=1).run(_refused, what)
    assert expected in one
    assert expected in other


@pytest.mark.parametrize("text", ["1", "2/2@10.0.0.1:29400", "0/2@10.0.0.1", "0/2@10.0.0.1:70000", "a/b@c:1"])
def test_a_place_that_is_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"it must be number/count@host:port, such as 0/4@10.0.0.1:29400"):
        resolve(replica=text)


def test_the_two_jobs_of_a_rank() -> None:
    settings = resolve(rank=1, world_size=2, master_addr="127.0.0.1", master_port=1, replica="2/3@10.0.0.1:29400")
    within, between = within_replica(settings), between_replicas(settings)
    assert (within.job, within.rank, within.world_size, within.on_failure) == ("default.replica2", 1, 2, "abort")
    assert (between.job, between.rank, between.world_size) == ("default.shard1", 2, 3)
    assert (between.master_addr, between.master_port) == ("10.0.0.1", 29401)
    with pytest.raises(InvalidArgument, match="give a lower one"):
        between_replicas(settings.replace(replica="0/2@10.0.0.1:65535"))
