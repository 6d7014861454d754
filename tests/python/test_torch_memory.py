"""Resident memory stays where it is, whatever the sizes that come."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from torch_cases import mean_loss, mlp, mlp_batch
from waiting import SLOWED

SIZE = 1024
STEPS = 150
MOST_ROWS = 500


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the system does not say how much memory this process holds")


def grown_mb() -> float:
    """By how much this process has grown over steps whose batches differ, after the largest of them."""
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(SIZE, SIZE, bias=False), scheme="sfb")
    sizes = random.Random(poseidon.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = 0.0
    for step in range(STEPS):
        rows = MOST_ROWS if step < 5 else sizes.randint(1, MOST_ROWS)
        optimizer.zero_grad()
        model(torch.ones(rows, SIZE)).mean().backward()
        optimizer.step()
        if step == 5:
            before = resident_mb()
    grown = resident_mb() - before
    poseidon.shutdown()
    return grown


def test_batches_that_vary_do_not_add_up_under_sfb() -> None:
    # The factors of all steps would be 150 * 250 * 4 kB * 2, 300 MB.
    grown = workers.run_fresh(2, grown_mb)
    assert all(isinstance(one, float) and one < 150 for one in grown), grown


def one_model_after_the_other() -> list[bool]:
    """Whether each of some models, dropped with updates in flight, is gone once the next one has trained."""
    gone, last = [], None
    for _ in range(3):
        module = mlp()
        model = poseidon.DistributedDataParallel(module)
        optimizer = poseidon.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        for step in range(2):
            optimizer.zero_grad()
            mean_loss(model, *mlp_batch(step, 4)).backward()
            optimizer.step()
        gc.collect()
        if last is not None:
            gone.append(all(one() is None for one in last))
        last = [weakref.ref(model.synchronizer), *map(weakref.ref, module.parameters())]
        del module, model, optimizer
    return gone


def test_models_dropped_with_updates_in_flight_are_freed() -> None:
    assert workers.run(2, one_model_after_the_other) == [[True, True]] * 2


def dropped(kind: str) -> list[str]:
    """What of a trained model is left when the program has dropped it, with Python's garbage collector off."""
    module: Any = mlp()
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    if kind != "plain":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=kind)
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(model, *mlp_batch(step, 4)).backward()
        optimizer.step()
    left = {type(one).__name__: weakref.ref(one) for one in (module, model, optimizer, model.synchronizer)}
    left |= {name: weakref.ref(param) for name, param in module.named_parameters()}
    if kind != "plain":
        optimizer.synchronize()
    del module, model, optimizer
    return [name for name, one in left.items() if one() is not None]


def all_dropped() -> list[list[str]]:
    dropped("worker")  # the first optimizer of a process imports much of torch, whose frames refer to each other
    gc.collect()
    gc.disable()
    try:
        return [dropped(kind) for kind in ("plain", "worker", "server")]
    finally:
        gc.enable()


def test_dropped_models_are_freed_at_once() -> None:
    assert workers.run(2, all_dropped) == [[[], [], []]] * 2


ENDS = """
import torch, poseidon.torch as poseidon
from poseidon import _core
_core.set_leak_warnings(True)
poseidon.init()
kept = []
for kind in ("plain", "worker", "server"):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model = poseidon.DistributedDataParallel(module, scheme="sfb")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if kind != "plain":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=kind)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        optimizer.step()
    kept.append((module, model, optimizer, loss, module[0].weight.grad))
if poseidon.rank() == 1:
    poseidon.shutdown()
"""


def test_a_script_that_ends_prints_nothing(tmp_path: Path) -> None:
    """With and without shutdown()."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "poseidon", "run", "-n", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOWED, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


HOOKS = """
import sys, torch, poseidon.torch as poseidon
from poseidon import _core
_core.set_leak_warnings(True) if "warned" in sys.argv else None
poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
hook = lambda *given: model and None
for param in model.parameters():
    param.register_hook(hook)
    param.register_post_accumulate_grad_hook(hook)
for module in model.modules():
    module.register_forward_hook(hook)
    module.register_full_backward_hook(hook)
output = model(torch.ones(2, 8, requires_grad=True))
output.register_hook(hook)
output.grad_fn.register_hook(hook)
output.square().mean().backward()
if poseidon.rank() == 1:
    poseidon.shutdown()
"""


@pytest.mark.parametrize("end", [[], ["warned"]])
def test_a_script_whose_hooks_refer_to_the_model_prints_nothing(end: list[str], tmp_path: Path) -> None:
    """They live until the process ends, with and without shutdown().

    That a test can see so shows that it would see what else is not freed."""
    script = tmp_path / "hooks.py"
    script.write_text(HOOKS)
    command = [sys.executable, "-m", "poseidon", "run", "-n", "2", str(script), *end]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 * SLOWED, check=True)
    assert ended.stdout == ""
    assert ("nanobind: leaked" in ended.stderr) if end == ["warned"] else ended.stderr == ""
