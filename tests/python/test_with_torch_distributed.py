"""The page docs/with-torch-distributed.md: each of its scripts runs, and what it says of gradient scaling holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from forked import run_script
from poseidon.launch import free_port
from torch_cases import all_equal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "with-torch-distributed.md"
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PRINTED = [
    r"epoch 0: loss \d\.\d+\nepoch 1: loss",
    r"accuracy 0\.\d+ of 75 samples, stop: False",
    r"largest norm \d\.\d+, ranks \[0, 1\]",
    r"norm \d\.\d+, scale 65536",
]


def test_all_code_blocks_are_scripts() -> None:
    assert [language for language, _ in FENCES] == ["python"] * len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_script_runs(tmp_path: Path, number: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(FENCES[number][1], encoding="utf-8")
    port = free_port()
    environments = [
        {**workers.job_variables(rank, 2, port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} for rank in (0, 1)
    ]
    outputs = run_script([str(script)], environments, tmp_path, 60)
    assert re.search(PRINTED[number], outputs[0]), outputs[0]
    assert outputs[1] == ""


def overflow_on_one_rank() -> tuple[float, list[float]]:
    model = poseidon.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [param.detach().clone() for param in model.parameters()]
    factor = float("inf") if poseidon.rank() == 1 else 1.0
    scaler.scale((factor * model(torch.ones(2, 4))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = [float((param - old).abs().sum()) for param, old in zip(model.parameters(), before, strict=True)]
    return scaler.get_scale(), moved


def test_an_overflow_on_one_rank_makes_all_leave_the_step_out() -> None:
    answers = workers.run(2, overflow_on_one_rank)
    assert all_equal(answers)
    assert answers[0] == (512.0, [0.0, 0.0])
