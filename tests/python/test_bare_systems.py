"""Training on systems that lack something: no /proc, no shared memory, a container's quota of processor time."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon import _core
from poseidon.launch import free_port
from poseidon.options import available_cpu_count
from waiting import SLOWED

WITHOUT_PROC = """
import os, sys, torch, poseidon.torch as poseidon
from poseidon.live import LinkMeter, own_addresses
assert not os.path.exists("/proc/self")
poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert LinkMeter().links() == () and own_addresses() == []
os.write(1, b"trained %d\\n" % poseidon.rank())  # two processes have this pipe
poseidon.shutdown()
"""
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_SECCOMP, _NO_NEW_PRIVILEGES, _FILTER = 22, 38, 2


def test_without_proc_training_goes_on(tmp_path: Path) -> None:
    alone = ["unshare", "-m", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "mount -t tmpfs none /proc"], check=False).returncode:
        pytest.skip("no mount namespaces")
    (tmp_path / "program.py").write_text(WITHOUT_PROC)
    both = f"mount -t tmpfs none /proc; for r in 0 1; do RANK=$r LOCAL_RANK=$r {sys.executable} program.py & done; wait"
    variables = workers.job_variables(0, 2, free_port())
    done = subprocess.run(
        [*alone, both], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("trained")) == ["trained 0", "trained 1"]


def forbid_shared_memory() -> None:
    """From now on memfd_create fails in this process and those that it makes, as in some containers."""
    number = _MEMFD_CREATE[platform.machine()]
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert libc.prctl(_SECCOMP, _FILTER, filter_) == 0


def train_where_rank_1_may_share_nothing(transport: str) -> float:
    if os.environ["RANK"] == "1":
        forbid_shared_memory()
    poseidon.init(transport=transport)
    torch.manual_seed(0)
    model = poseidon.DistributedDataParallel(nn.Linear(4, 4))
    (model(torch.ones(2, 4)).sum() * (1 + poseidon.rank())).backward()
    (found, *_) = (float(one.grad.sum()) for one in model.parameters() if one.grad is not None)
    poseidon.shutdown()
    return found


@pytest.mark.skipif(platform.machine() not in _MEMFD_CREATE, reason="the number of the system call is not known")
def test_a_rank_that_may_share_no_memory_is_reached_over_the_network() -> None:
    first, second = workers.run_fresh(2, train_where_rank_1_may_share_nothing, "auto")
    assert first == second == 48.0  # the mean of 1 and 2 times the 2 rows of 16 ones
    answers = workers.run_fresh(2, train_where_rank_1_may_share_nothing, "shm", POSEIDON_TIMEOUT=str(3 * SLOWED))
    assert "use transport=auto" in str(answers[1])


def test_a_quota_of_processor_time_bounds_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for quota, cores in ((None, 16), (2.5, 2), (0.5, 1), (64.0, 16)):
        monkeypatch.setattr(_core, "container_processors", lambda quota=quota: quota)
        assert available_cpu_count() == cores
