"""What `poseidon plan` says of a model's parameters, and what the plan of its training says."""

from __future__ import annotations

import sys

import torch

import poseidon.torch as poseidon
from poseidon.cli.measured_script import measure_object
from poseidon.models import ModelTable
from poseidon.planner import ClusterSpec, Exchange, make_report
from poseidon.torch.measure_model import load, loss_of

RANKS = 2
SMALL_BYTES = 256

Rows = dict[str, tuple[str, str, float, float]]  # by parameter: scheme, wire, bytes, dense bytes


def train_and_plan(name: str, folder: str, steps: int) -> Rows:
    """In a worker: trains the model `module:object` of a folder, all ranks on one batch."""
    sys.path.insert(0, folder)
    torch.manual_seed(0)
    model, batch = load(name)
    wrapped = poseidon.DistributedDataParallel(model)
    optimizer = torch.optim.SGD([one for one in wrapped.parameters() if one.requires_grad], lr=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batch)
        assert loss is not None
        loss.backward()
        optimizer.step()
    return {row.layer: (row.scheme, row.wire, row.bytes, row.dense_bytes) for row in wrapped.plan()}


def planned(name: str) -> Rows:
    """What the plan says of `module:object` of the working directory, for as many hosts."""
    return planned_table(measure_object(name))


def planned_table(table: ModelTable, replayed: bool = False) -> Rows:
    """What the plan says of a layer table."""
    exchange = Exchange(by_time=False, sizes={"small_bytes": SMALL_BYTES}, replayed=replayed)
    report = make_report(table, ClusterSpec(hosts=RANKS, bits_per_second=1e9), exchange)
    return {row.layer: (row.scheme, row.wire, row.bytes, row.dense_bytes) for row in report.parameters}
