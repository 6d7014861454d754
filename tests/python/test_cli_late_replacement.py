"""`poseidon run --on-failure rejoin|shrink`: a worker that is lost at the very end is not replaced into nothing."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from poseidon.launch import Failure, run_workers
from waiting import IN_PROGRAMS

# Worker `victim` is killed in step 3, or when all steps are done. Its replacement comes when the other one has ended,
# or just before it ends.
PROGRAM = """
import os, pathlib, signal
rank, folder, moment = int(os.environ["RANK"]), pathlib.Path(sys.argv[1]), sys.argv[2]
is_new = not (folder / f"start-{rank}").exists()
(folder / f"start-{rank}").touch()
if not is_new:
    (folder / "replaced").write_text(str(os.getpid()))
    if moment == "step":
        wait_for(folder / "trained")
        (folder / "comes").touch()
import torch
import poseidon.torch as poseidon
torch.set_num_threads(1)
poseidon.init(timeout=6)
model = poseidon.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
recovery = poseidon.Recovery(model, optimizer)
while recovery.until(6):
    with recovery.attempt():
        if rank == 0 and is_new and moment == "step" and recovery.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
if rank == 0 and is_new and moment == "end":
    os.kill(os.getpid(), signal.SIGKILL)
with (folder / "saved").open("a") as file:
    file.write(f"{rank} {is_new}\\n")
if moment == "end":
    replacement = int(wait_until(lambda: (folder / "replaced").exists() and (folder / "replaced").read_text(), "it"))
    poseidon.shutdown()
    happens(lambda: not runs(replacement), 1)
(folder / "trained").touch()
if moment == "step":
    happens((folder / "comes").exists, 0.5)
"""


@pytest.mark.parametrize(
    ("on_failure", "moment", "codes", "failure"),
    [
        ("shrink", "step", [-signal.SIGKILL, 0], None),
        ("shrink", "end", [-signal.SIGKILL, 0], None),
        ("rejoin", "end", [-signal.SIGKILL, 0], Failure(0, -signal.SIGKILL)),
    ],
)
def test_a_run_that_has_ended_takes_no_replacement(
    on_failure: str, moment: str, codes: list[int], failure: Failure | None, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_PROGRAMS + PROGRAM)
    began = time.monotonic()
    command = [sys.executable, str(program), str(tmp_path), moment]
    outcome = run_workers(command, 2, options={"on_failure": on_failure, "flight_record": "off"})
    assert (outcome.codes, outcome.first_failure) == (codes, failure)
    assert (tmp_path / "saved").read_text() == "1 True\n"
    assert (tmp_path / "replaced").exists() or moment == "step"
    assert time.monotonic() - began < 40
