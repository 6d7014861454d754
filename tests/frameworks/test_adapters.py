"""The adapters for Accelerate, Trainer and Lightning refuse what they cannot take, and say what to do instead."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from poseidon.errors import InvalidArgument
from poseidon.torch.hugging_face import overlap
from runs import skip_without


def test_overlap_wants_the_prepared_optimizer() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgument, match="not a SGD: prepare it first"):
        overlap(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_overlap_wants_poseidons_wrapper() -> None:
    model = nn.Linear(2, 2)
    prepared = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="start with `poseidon run --drop-in`"):
        overlap(prepared, model)


def test_the_strategy_names_a_wrong_argument() -> None:
    skip_without("lightning")
    code = "from poseidon.torch.lightning import PoseidonStrategy; PoseidonStrategy(overlap='server')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "overlap is 'server': pass True, False or a dict of DistributedOptimizer's arguments" in done.stderr


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_strategy_is_that_of_the_imported_package(package: str) -> None:
    skip_without(package)
    code = (
        f"import {package}; from poseidon.torch.lightning import PoseidonStrategy as S; import pickle;"
        "print(S.__mro__[1].__module__.partition('.')[0], pickle.loads(pickle.dumps(S)) is S)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [package, "True"]
