"""Whatever goes wrong ends on every worker in bounded time with one error that says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.launch import free_port
from torch_cases import mean_loss, mlp, mlp_batch, own_rows, parameters_digest
from waiting import compute_for, end, wait_for


def different_model(kind: str) -> None:
    module = mlp()
    if poseidon.rank() == 1:
        if kind == "shape":
            module[2] = nn.Linear(64, 40, bias=False)
        elif kind == "dtype":
            module[0].weight.data = module[0].weight.data.double()
        elif kind == "frozen":
            module[4].bias.requires_grad_(False)
        elif kind == "buffer":
            module.register_buffer("extra", torch.zeros(2))
    poseidon.DistributedDataParallel(module, scheme="ps" if kind == "scheme" and poseidon.rank() == 1 else "auto")


def mismatch_text(kind: str) -> tuple[str, str]:
    try:
        different_model(kind)
    except poseidon.PoseidonError as error:
        result = error.code, str(error)
    else:
        result = "", "nothing was raised"
    # The ranks still agree on what was exchanged: the job goes on.
    model = poseidon.DistributedDataParallel(mlp())
    mean_loss(model, *map(own_rows, mlp_batch(0, 6))).backward()
    return result


@pytest.mark.parametrize(
    ("kind", "word"),
    [("shape", "2.bias"), ("dtype", "float64"), ("frozen", "4.bias"), ("buffer", "extra"), ("scheme", "scheme ps")],
)
def test_mismatch_names_the_first_difference(kind: str, word: str) -> None:
    for code, text in workers.run(3, mismatch_text, kind):
        assert code == "mismatch"
        assert "rank 0 has" in text
        assert "rank 1 has" in text
        assert word in text


def dies(where: str) -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(mlp())
    inputs, targets = map(own_rows, mlp_batch(0, 6))
    mean_loss(model, inputs, targets).backward()
    if poseidon.rank() == 1:
        if where == "between":
            os._exit(3)
        model.module[2].register_full_backward_hook(lambda *_: os._exit(3))
    before = parameters_digest(model)
    begin = time.monotonic()
    try:
        for _ in range(2):
            mean_loss(model, inputs, targets).backward()
    except poseidon.PoseidonError as error:
        assert parameters_digest(model) == before
        assert time.monotonic() - begin < 2 * 5.0
        return f"{error.code}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("where", ["between", "backward"])
def test_a_dead_worker_ends_the_others(where: str) -> None:
    answers = workers.run_fresh(3, dies, where, POSEIDON_TIMEOUT="5")
    assert answers[1] is None
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, str), answer
        assert answer.split(":")[0] in ("peer_lost", "aborted", "timeout")
        assert "1" in answer


def stalls(folder: Path) -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(mlp())
    inputs, targets = map(own_rows, mlp_batch(0, 4))
    if poseidon.rank() == 1:
        wait_for(folder / "the other one has given up")
    try:
        mean_loss(model, inputs, targets).backward()
    except poseidon.PoseidonError as error:
        (folder / "the other one has given up").touch()
        return error.code
    return "nothing was raised"


def test_a_worker_that_does_not_come_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    answers = workers.run_fresh(2, stalls, tmp_path, POSEIDON_TIMEOUT="2")
    assert answers[0] == "timeout"
    assert answers[1] in ("aborted", "peer_lost", "timeout")


def alone() -> str:
    if poseidon_rank() == 1:
        return "did not come"
    try:
        poseidon.init()
    except poseidon.PoseidonError as error:
        return f"{error.code}: {error}"
    return "nothing was raised"


def poseidon_rank() -> int:
    return int(os.environ["RANK"])


def test_a_worker_that_never_arrives_is_named() -> None:
    answers = workers.run_fresh(2, alone, POSEIDON_TIMEOUT="2")
    assert answers[0].startswith("timeout")
    assert "1" in answers[0].split(":", 1)[1]


SCRIPT = """
    import os, signal, sys, time
    import torch
    import poseidon.torch as poseidon

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without
    torch.set_num_threads(1)
    poseidon.init()
    model = poseidon.DistributedDataParallel(torch.nn.Linear(40, 40))
    print("ready", flush=True)
    for step in range(100_000):
        if sys.argv[1] == "raises" and step == 3 and poseidon.rank() == 1:
            raise ValueError("the data of rank one is broken")
        model(torch.ones(2, 40)).sum().backward()
        if sys.argv[1] == "finishes" and step == 3:
            break
"""


def start_script(tmp_path: Path, mode: str, world_size: int = 2) -> list[subprocess.Popen[str]]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(script), mode],
            env={**os.environ, **workers.job_variables(rank, world_size, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and error output of each; kills what does not end."""
    results = []
    try:
        for process in processes:
            _, errors = process.communicate(timeout=40)
            results.append((process.returncode, errors))
    finally:
        end(*processes)
    return results


def test_an_unhandled_exception_reaches_the_other_ranks(tmp_path: Path) -> None:
    (code, errors), (own_code, own_errors) = finish(start_script(tmp_path, "raises"))
    assert code != 0
    assert own_code != 0
    assert "the data of rank one is broken" in own_errors
    assert "the data of rank one is broken" in errors
    assert "Aborted" in errors


def test_a_script_that_ends_says_goodbye(tmp_path: Path) -> None:
    for code, errors in finish(start_script(tmp_path, "finishes")):
        assert (code, errors) == (0, "")


def test_ctrl_c_ends_all_workers(tmp_path: Path) -> None:
    processes = start_script(tmp_path, "forever")
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    processes[0].send_signal(signal.SIGINT)
    (code, errors), (other_code, other_errors) = finish(processes)
    assert code != 0
    assert other_code != 0
    assert "KeyboardInterrupt" in errors
    assert "interrupted" in other_errors or "rank 0" in other_errors


def reentrant_twice() -> str:
    """A nested backward that reaches a parameter whose exchange has started is refused, not summed wrongly."""
    poseidon.init(group_bytes=1)  # the gradients of a group are complete when its exchange starts
    module = nn.Linear(40, 40)
    model = poseidon.DistributedDataParallel(module)

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                module(torch.ones(2, 40)).sum().backward()
            return grad

    leaf = torch.ones(2, 40, requires_grad=True)
    bias_first = module.bias * 1.0
    try:
        (model(Nested.apply(leaf)) + bias_first).sum().backward()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was raised"


def test_nested_backward_is_refused_by_name() -> None:
    for text in workers.run_fresh(2, reentrant_twice):
        assert "twice" in text
        assert "weight" in text or "bias" in text


def test_under_torchrun(tmp_path: Path) -> None:
    """Its agent holds the store on MASTER_PORT; the workers meet there."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    done = subprocess.run(
        [sys.executable, *command, str(script), "finishes"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ready") == 2


def begins_again(folder: Path) -> int:
    """Jobs of the same processes, which meet at the same port; what the earlier ones have left is kept."""
    kept: list[object] = []
    for job, on_failure in enumerate(("abort", "abort", "rejoin", "rejoin")):
        poseidon.init(on_failure=on_failure)
        model = poseidon.DistributedDataParallel(nn.Linear(3, 2))
        kept += [model] if on_failure == "abort" else [model, poseidon.Recovery(model)]
        poseidon.barrier()
        if poseidon.rank() == job % 2:
            wait_for(folder / f"the other one has left job {job}")
            compute_for(0.1)  # in which it begins again
        poseidon.shutdown()
        (folder / f"the other one has left job {job}").touch()
    return len(kept)


def test_processes_may_begin_again_at_the_same_port(tmp_path: Path) -> None:
    assert workers.run_fresh(2, begins_again, tmp_path) == [6, 6]


def other_exchange() -> tuple[str, str, float]:
    poseidon.init()
    model = poseidon.DistributedDataParallel(mlp())
    began = time.monotonic()
    try:
        if poseidon.rank() == 0:
            poseidon.barrier()
        else:
            mean_loss(model, *map(own_rows, mlp_batch(0, 6))).backward()
    except poseidon.PoseidonError as error:
        return error.code, str(error), time.monotonic() - began
    return "", "", 0.0


def test_ranks_that_wait_for_each_other_are_told_within_seconds() -> None:
    for code, text, seconds in workers.run_fresh(3, other_exchange):
        assert code == "mismatch"
        assert "all ranks wait for each other" in text
        assert "'barrier() (1 x int64)'" in text
        assert text.count("was waiting for the result of chunk 0 from server 0") in (2, 3)
        assert seconds < 20
