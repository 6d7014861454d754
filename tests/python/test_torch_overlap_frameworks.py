"""DistributedOptimizer inside the objects that Accelerate and Lightning put around optimizers."""

from __future__ import annotations

import copy
import math
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import poseidon.torch as poseidon
import workers
from overlap_cases import Model, own_batch
from torch_cases import all_equal, digest, mean_loss, mlp

accelerate = pytest.importorskip("accelerate")


@dataclass(frozen=True)
class Case:
    """Training with the torch optimizer, and with updates on workers or servers."""

    kind: str
    update: str
    distributed: bool = True

    def optimizer(self, model: Model) -> Any:
        # Servers have the arithmetic of torch's default kernels whatever the flags say.
        fused = {"fused": True} if self.distributed or self.update == "worker" else {}
        make: Any = Adam if self.kind == "adam" else partial(SGD, momentum=0.9)
        optimizer = make(model.parameters(), lr=0.01, **fused)
        return poseidon.DistributedOptimizer(optimizer, model, self.update) if self.distributed else optimizer

    def parts(self) -> Any:
        model = Model(mlp(), scheme="ps")
        return model, self.optimizer(model)


def same_with_and_without(train: Any, case: Case) -> str:
    digests = [train(replace(case, distributed=distributed)) for distributed in (True, False)]
    assert digests[0] == digests[1]
    return digests[0]


CASES = [Case(kind, update) for kind in ("adam", "momentum") for update in ("worker", "server")]


def accelerated(case: Case) -> str:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1 if case.update == "server" else 2)
    assert accelerator.num_processes == 1  # the processes know each other through Poseidon alone
    model, optimizer = case.parts()
    optimizer, scheduler = accelerator.prepare(optimizer, StepLR(optimizer, 2, 0.5))
    assert isinstance(optimizer.optimizer, Optimizer)
    for step in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, *own_batch(step)))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), math.inf if case.update == "server" else 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = [group["lr"] for group in optimizer.param_groups]
    state = optimizer.state_dict()["state"]
    return digest([*model.parameters(), *(v for s in state.values() for v in s.values() if v is not None)]) + str(rates)


def without_launcher(function: Any, *args: Any) -> Any:
    """Accelerate would start torch's own processes where a launcher's variables are set."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"]
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    try:
        return function(*args)
    finally:
        os.environ.update(kept)


@pytest.mark.parametrize("case", CASES)
def test_accelerate(case: Case) -> None:
    assert all_equal(workers.run(2, without_launcher, same_with_and_without, accelerated, case))


def wrapped_by_lightning(optimizer: Any) -> list[Any]:
    """As its trainer and its Fabric do."""
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import SingleDeviceStrategy as OfTrainer

    of_trainer = LightningOptimizer(optimizer)
    of_trainer._strategy = OfTrainer()
    of_trainer._strategy.optimizers = [optimizer]
    return [_FabricOptimizer(optimizer, SingleDeviceStrategy()), of_trainer]


def with_fabric(case: Case) -> str:
    model, inner = case.parts()
    optimizer = wrapped_by_lightning(inner)[0]
    assert isinstance(optimizer, type(inner))
    scheduler = StepLR(optimizer, 2, 0.5)
    for step in range(6):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, *own_batch(step))
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, inner)]
    return digest(model.parameters()) + str(rates)


@pytest.mark.parametrize("case", CASES)
def test_fabric(case: Case) -> None:
    pytest.importorskip("lightning")
    assert all_equal(workers.run(2, same_with_and_without, with_fabric, case))


def methods_through_a_wrapper(case: Case) -> str:
    """What users may call on the object that Lightning's trainer gives them."""
    model, inner = case.parts()
    optimizer = wrapped_by_lightning(inner)[1]
    for step in range(6):
        optimizer.zero_grad()
        mean_loss(model, *own_batch(step)).backward()
        inner.step()
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0]["lr"] = 0.003
            (optimizer if case.distributed else inner).load_state_dict(saved)  # a torch optimizer would not notice
            assert inner.param_groups[0]["lr"] == 0.003
        for group in (optimizer if case.distributed else inner).param_groups:
            group["lr"] *= 0.9
    if case.distributed:
        optimizer.synchronize()
        assert optimizer.step_count == 6
        assert optimizer.model is model
        assert list(optimizer.missed_steps()) == []
    state = [value for one in inner.state_dict()["state"].values() for value in one.values() if value is not None]
    return digest([*model.parameters(), *state])


@pytest.mark.parametrize("case", CASES)
def test_methods_through_the_object_of_lightning(case: Case) -> None:
    pytest.importorskip("lightning")
    assert all_equal(workers.run(2, same_with_and_without, methods_through_a_wrapper, case))


def trained_by_lightning(case: Case) -> str:
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(mlp(), scheme="ps")

        def training_step(self, batch: Any) -> torch.Tensor:
            return mean_loss(self.model, *batch)

        def configure_optimizers(self) -> Any:
            optimizer = case.optimizer(self.model)
            return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]

    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return own_batch(index)

    task = Task()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.05 if case == replace(case, kind="momentum", update="worker") else None,
    )
    trainer.fit(task, torch.utils.data.DataLoader(Batches(), batch_size=None))
    return digest(task.model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_lightnings_trainer(case: Case) -> None:
    pytest.importorskip("lightning")
    assert all_equal(workers.run(2, without_launcher, same_with_and_without, trained_by_lightning, case))


def wrapped_the_other_way_round() -> list[str]:
    texts = []
    model = Model(mlp())
    for one in wrapped_by_lightning(SGD(model.parameters(), lr=0.1)):
        with pytest.raises(poseidon.PoseidonError) as caught:
            poseidon.DistributedOptimizer(one, model)
        texts.append(str(caught.value))
    return texts


def test_the_other_way_round_is_refused() -> None:
    pytest.importorskip("lightning")
    for texts in workers.run(2, wrapped_the_other_way_round):
        assert all(re.search(r"another one's (Fabric|Lightning)SGD: pass the optimizer that is ins", t) for t in texts)
