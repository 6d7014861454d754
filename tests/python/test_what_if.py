"""Critical paths of predicted steps, records of runs, and what is predicted from them."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core")

from poseidon.adapter.plan_table import PlanRow
from poseidon.adapter.run_record import RunRecord, RunRecorder, load_run
from poseidon.adapter.stats import LayerSynchronization, StepRecord
from poseidon.errors import InvalidArgument
from poseidon.models import model_table
from poseidon.options import resolve
from poseidon.planner import Change, ClusterSpec, Exchange, Planner, Prediction, read_run, what_if
from poseidon.planner.critical_path import critical_path, path_words, shares
from poseidon.planner.path_page import write_what_if
from poseidon.report import report_of_run
from poseidon.report.trace import trace_events

CLI = [sys.executable, "-m", "poseidon"]
LAPTOP = ClusterSpec(hosts=4, bits_per_second=1e9, products_per_s=2e10)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("model", "hosts", "rate"), [("VGG19", 8, 1e9), ("ResNet-50", 4, 1e10), ("GoogLeNet", 2, 1e8)])
def test_a_critical_path_is_the_whole_step(model: str, hosts: int, rate: float, overlap: bool) -> None:
    planner = Planner(model_table(model), ClusterSpec(hosts=hosts, bits_per_second=rate), Exchange(overlap=overlap))
    for step in (planner.predict(), planner.predict_by_message()):
        parts = critical_path(step)
        assert parts[0].begin_s == 0
        assert parts[-1].end_s == step.step_s
        assert all(part.end_s == later.begin_s for part, later in pairwise(parts))
        total = sum(seconds for layers in shares(parts).values() for seconds in layers.values())
        assert total == pytest.approx(step.step_s)


def test_a_path_names_what_limits() -> None:
    table = model_table("VGG19")
    fast = Planner(table, ClusterSpec(hosts=8, bits_per_second=1e11), Exchange())
    assert path_words(critical_path(fast.predict())).startswith("67 % the backward pass")
    slow = Planner(table, ClusterSpec(hosts=8, bits_per_second=1e8), Exchange(scheme="ps"))
    words = path_words(critical_path(slow.predict()))
    assert "the port (fc6.weight" in words
    straggler = Planner(table, ClusterSpec(hosts=4, bits_per_second=1e10, slowest=3.0), Exchange())
    step = straggler.predict_by_message(hosts=["gpu-7", "another host", "another host", "another host"])
    assert "the forward pass of gpu-7" in path_words(critical_path(step))


def recorded(step: Prediction, workers: int, slow_times: float = 1.0) -> list[RunRecord]:
    """Records of a run whose steps are as predicted for the last rank. It computes `slow_times` times as long."""
    return [_record(step, rank, workers, 1.0 if rank == workers - 1 else 1 / slow_times) for rank in range(workers)]


def _record(step: Prediction, rank: int, workers: int, times: float) -> RunRecord:
    plan, layers = [], []
    ready = step.ready_s
    for load, completed_s in zip(step.loads, step.completed_s, strict=True):
        for member, place in zip(load.unit.members, load.unit.places, strict=True):
            count = load.unit.factor_count if member.factorable else None
            plan.append(
                PlanRow(member.name, member.shape, count, load.scheme, "fp32", 0, 0, 0, None, None, None, None, "")
            )
            layers.append((member.name, load.scheme, ready[place] * times, completed_s))
    backward_s = max(ready.values()) * times
    compute_s = step.table.iteration_seconds * step.cluster.slowest * times
    steps = []
    for number in range(4):
        begin_ns = round(number * step.step_s * 1e9) + 5_000_000_000
        times = [
            LayerSynchronization(
                *(name, scheme, 0, 0, 0, round(begin_ns + at_s * 1e9), round(begin_ns + at_s * 1e9)),
                *(round(begin_ns + max(done_s, at_s) * 1e9), 0, begin_ns, round(begin_ns + backward_s * 1e9)),
            )
            for name, scheme, at_s, done_s in layers
        ]
        waited_ns = max(0, round((step.step_s - compute_s) * 1e9))
        steps.append(StepRecord(begin_ns, round(begin_ns + backward_s * 1e9), times, begin_ns - 1_000_000, waited_ns))
    options = {"scheme": "auto", "wire": "fp32", "lossy": "", "parameter_wire": "fp32", "small_bytes": 32768,
               "group_bytes": 1048576, "chunk_bytes": "auto", "partition": "balanced", "schedule": "wait_free",
               "revise": "auto", "priority_classes": 2, "priority_order": "urgency", "priority_threshold": "auto",
               "stragglers": "wait", "consistency": "bsp"}  # fmt: skip
    cluster = step.cluster
    return RunRecord(
        *("torch", "train.py", "default", rank, workers, f"gpu-{rank}", "one boot", [], [], workers, "colocated"),
        *(options, step.exchange.overlap, 5, cluster.payload_bytes_per_s, cluster.latency_s, cluster.products_per_s),
        *([], {}, plan[::-1], steps),
    )


@pytest.mark.parametrize("model", ["VGG19", "ResNet-50", "AlexNet"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_that_went_as_predicted_is_predicted_again(model: str, overlap: bool) -> None:
    planner = Planner(model_table(model), LAPTOP, Exchange(overlap=overlap))
    run = read_run(recorded(planner.predict(), 4))
    assert run.slow_host is None
    faster = replace(LAPTOP, bits_per_second=4e9)
    asked = [Change(), Change(link="4x"), Change(link="4gbit"), Change(hosts=2), Change(scheme="ps")]
    as_it_was, times_4, gbit_4, half, ps = (one.step.step_s for one in what_if(run, asked).changes)
    # Forward and backward passes are told apart, but not by layer, so overlap may differ a little.
    near = 0.03 if overlap else 0.01
    assert as_it_was == pytest.approx(planner.predict().step_s, rel=near)
    assert times_4 == pytest.approx(planner.predict(faster).step_s, rel=near)
    assert gbit_4 == pytest.approx(times_4)
    half_of_it = Planner(planner.table, replace(LAPTOP, hosts=2), planner.exchange)
    assert half == pytest.approx(half_of_it.predict().step_s, rel=near)
    by_ps = Planner(planner.table, LAPTOP, replace(planner.exchange, scheme="ps"))
    assert ps == pytest.approx(by_ps.predict().step_s, rel=near)


def test_a_straggler_is_named_and_taken_away() -> None:
    table, slow = model_table("ResNet-50"), replace(LAPTOP, slowest=3.0)
    step = Planner(table, slow, Exchange()).predict_by_message()
    found = what_if(read_run(recorded(step, 4, 3.0)), [Change(straggler=False)])
    assert found.run.slow_host == "gpu-3"
    assert found.run.cluster.slowest == pytest.approx(3.0, rel=0.01)
    assert abs(found.error) < 0.01
    assert "of gpu-3" in " ".join(found.sentences())
    (without,) = found.changes
    assert without.step.step_s == pytest.approx(Planner(table, LAPTOP, Exchange()).predict().step_s, rel=0.05)
    assert without.words == "gpu-3 as fast as the others"


def connected(records: list[RunRecord], slow: int | None, times: float) -> list[RunRecord]:
    """The same with what ranks have sent to each other: 12 MB each, at 1 MB/s, or more slowly to and from one rank."""
    found = []
    for record in records:
        others = [rank for rank in range(len(records)) if rank != record.rank]
        seconds = {rank: 12.0 * (times if slow in (rank, record.rank) else 1.0) for rank in others}
        sent = {f"10.0.0.{rank}": (12_000_000, seconds[rank]) for rank in others} | {"127.0.0.1": (9, 1.0)}
        found.append(replace(record, addresses=["127.0.0.1", f"10.0.0.{record.rank}"], sent=sent))
    return found


def test_a_slow_port_is_named_and_taken_away() -> None:
    table = model_table("VGG19")
    step = Planner(table, LAPTOP, Exchange()).predict()
    records = connected(recorded(step, 4), 2, 5.0)
    found = what_if(read_run(records), [Change(slow_port=False), Change(link="4gbit"), Change(hosts=1)])
    # A fast port carries 24 MB in 12 s beside what it carries of the slow one's, and that 36 MB in 60 s.
    assert (found.run.slow_port, found.run.port_ratio) == ("gpu-2", pytest.approx(24 / 12 / (36 / 60)))
    assert "The port of gpu-2 carries 3.33 times less than those of the others." in found.sentences()
    assert "the port of gpu-2 (" in path_words(found.now.path)
    assert found.now.step.step_s == pytest.approx(step.step_s, rel=0.05), "the slow port is the one that was measured"
    without, all_fast, _ = (one.step.step_s for one in found.changes)
    assert found.changes[0].words == "the port of gpu-2 as fast as the others'"
    assert without == pytest.approx(
        Planner(table, replace(LAPTOP, bits_per_second=1e9 * 24 / 12 / (36 / 60)), Exchange()).predict().step_s,
        rel=0.02,
    )
    assert all_fast < without < found.now.step.step_s


def test_equal_ports_two_hosts_and_unknown_addresses_name_no_port() -> None:
    step = Planner(model_table("VGG19"), LAPTOP, Exchange()).predict()
    assert read_run(connected(recorded(step, 4), None, 1.0)).slow_port is None
    assert read_run(connected(recorded(step, 4), 2, 1.5)).slow_port is None, "that may be chance"
    assert read_run(recorded(step, 4)).slow_port is None
    two = Planner(model_table("VGG19"), replace(LAPTOP, hosts=2), Exchange()).predict()
    assert read_run(connected(recorded(two, 2), 1, 5.0)).slow_port is None, "it may be the other's"


def test_what_no_record_tells_is_refused() -> None:
    step = Planner(model_table("VGG19"), LAPTOP, Exchange()).predict()
    records = recorded(step, 4)
    late = [replace(one, options={**one.options, "stragglers": "drop"}) for one in records]
    with pytest.raises(InvalidArgument, match="stragglers=drop"):
        read_run(late)
    lossy = [replace(one, plan=[replace(row, scheme="topk") for row in one.plan]) for one in records]
    with pytest.raises(InvalidArgument, match="topk"):
        read_run(lossy)
    halves = [_with_rows(one, wire="bf16") for one in records]
    assert read_run(halves).exchange.wire == "bf16", "as the program has wrapped its model, whatever the option says"
    assert read_run([_with_rows(one, dtype="bfloat16") for one in records]).exchange.wire == "bf16"
    with pytest.raises(InvalidArgument, match="gradients of float64 that travel as fp32"):
        read_run([_with_rows(one, dtype="float64") for one in records])
    mixed = [replace(one, plan=[replace(one.plan[0], wire="int8", scheme="ps"), *one.plan[1:]]) for one in records]
    with pytest.raises(InvalidArgument, match="travel as fp32, int8"):
        read_run(mixed)
    chosen = [_with_rows(one, reason="chosen by the user", scheme="sfb") for one in records]
    assert read_run(chosen).exchange.scheme == "sfb"
    narrow = [replace(one, options={**one.options, "parameter_wire": "bf16"}) for one in records]
    with pytest.raises(InvalidArgument, match="parameter_wire=bf16"):
        read_run(narrow)
    hooked = [replace(one, steps=[replace(step, layers=[]) for step in one.steps]) for one in records]
    with pytest.raises(InvalidArgument, match="communication hook"):
        read_run(hooked)
    with pytest.raises(InvalidArgument, match="nothing is known of its network"):
        read_run([replace(one, link_bytes_per_s=None) for one in records])
    dense = [replace(one, plan=[replace(row, factor_count=None, scheme="ps") for row in one.plan]) for one in records]
    with pytest.raises(InvalidArgument, match="record it with scheme=auto"):
        what_if(read_run(dense), [Change(scheme="sfb")])
    assert all("sfb" not in one.words for one in what_if(read_run(dense), []).changes)
    for link in ("x", "0x", "-2x", "fast"):
        with pytest.raises(InvalidArgument, match="link"):
            what_if(read_run(records), [Change(link=link)])
    with pytest.raises(InvalidArgument, match="no prediction knows the scheme"):
        what_if(read_run(records), [Change(scheme="best")])


def _with_rows(record: RunRecord, **changes: str) -> RunRecord:
    return replace(record, plan=[replace(row, **changes) for row in record.plan])  # type: ignore[arg-type]


def save(records: list[RunRecord], folder: Path) -> None:
    """As workers do."""
    folder.mkdir(exist_ok=True)
    for record in records:
        (folder / f"rank-{record.rank}.json").write_text(json.dumps(asdict(record)))


def test_folders_that_are_no_run_are_told(tmp_path: Path) -> None:
    records = recorded(Planner(model_table("AlexNet"), LAPTOP, Exchange()).predict(), 4)
    with pytest.raises(InvalidArgument, match="has no records of a run: start one with `poseidon run --record"):
        load_run(tmp_path)
    save(records, tmp_path)
    assert load_run(tmp_path) == records
    (tmp_path / "rank-2.json").unlink()
    with pytest.raises(InvalidArgument, match="lacks the records of 1 of 4 ranks, such as rank 2"):
        load_run(tmp_path)
    save([replace(records[2], job="other")], tmp_path)
    with pytest.raises(InvalidArgument, match="different runs"):
        load_run(tmp_path)
    save([replace(records[2], first_step=55)], tmp_path)
    with pytest.raises(InvalidArgument, match="different steps"):
        load_run(tmp_path)
    for data, words in (
        (b"{}", "no record of a run, or a part of one: it lacks 'version'; copy it again"),
        (b"[1]", "no record of a run, or a part of one: its values have another form"),
        (b'{"version"\n: 1, ', "no record of a run, or a part of one: it is not JSON from line 2, column"),
        (b"\xff", "no record of a run, or a part of one: it is not text"),
        (json.dumps({**asdict(records[2]), "version": 9}).encode(), "of another version"),
    ):
        (tmp_path / "rank-2.json").write_bytes(data)
        with pytest.raises(InvalidArgument, match=rf"rank-2\.json is {words}"):
            load_run(tmp_path)


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, text: str, encoding: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    record = recorded(Planner(model_table("AlexNet"), LAPTOP, Exchange()).predict(), 2)[1]
    recorder = RunRecorder(resolve(record=str(tmp_path)), "torch")
    with pytest.warns(UserWarning, match="No space left .* lacks rank 1: make room there, or name another folder"):
        recorder.write(record)
    assert list(tmp_path.iterdir()) == []


def test_clocks_of_machines_are_brought_together() -> None:
    records = recorded(Planner(model_table("AlexNet"), LAPTOP, Exchange()).predict(), 4)
    ahead_ns = 7_000_000_000
    shifted = [_shifted(one, ahead_ns) if one.rank == 2 else one for one in records]
    origins = {record.rank: record.origin_ns for record in report_of_run(shifted).ranks}
    assert origins == {0: 0, 1: 0, 2: ahead_ns, 3: 0}
    events = trace_events(report_of_run(shifted))["traceEvents"]
    begins = {pid: min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in range(4)}
    assert len(set(begins.values())) == 1


def _shifted(record: RunRecord, by_ns: int) -> RunRecord:
    def moved(layer: LayerSynchronization) -> LayerSynchronization:
        return replace(layer, **{name: at + by_ns for name, at in asdict(layer).items()
                                 if name.endswith("_ns") and name != "compute_ns"})  # fmt: skip

    steps = [
        StepRecord(
            step.backward_begin_ns + by_ns,
            step.backward_end_ns + by_ns,
            [moved(layer) for layer in step.layers],
            step.forward_begin_ns + by_ns,
            step.waited_ns,
        )
        for step in record.steps
    ]
    return replace(record, steps=steps, boot="another boot")


SCRIPT = """
import sys
import torch
import poseidon.torch as poseidon

poseidon.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512, bias=False))
model = poseidon.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if sys.argv[1:]:
    optimizer = poseidon.DistributedOptimizer(optimizer, model)
for step in range(int(sys.argv[1]) if sys.argv[1:] else 17):
    optimizer.zero_grad()
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
poseidon.shutdown()
"""


def test_workers_record_a_run(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "records"
    script.write_text(SCRIPT)
    run = [*CLI, "run", "-n", "2", "--record", str(folder), str(script)]
    subprocess.run(run, check=True, capture_output=True, timeout=120)
    first = load_run(folder)
    assert [one.first_step for one in first] == [5, 5]
    assert [row.layer for row in first[0].plan] == ["0.weight", "0.bias", "2.weight"]
    assert [row.factor_count for row in first[0].plan] == [8, None, 8]
    assert first[0].link_bytes_per_s is not None
    assert all(step.forward_begin_ns < step.backward_begin_ns < step.backward_end_ns for step in first[0].steps)
    assert len(first[0].steps) == 10
    assert not first[0].overlap

    subprocess.run([*run, "66"], check=True, capture_output=True, timeout=120)
    later = load_run(folder)
    assert [(one.first_step, one.overlap) for one in later] == [(55, True)] * 2

    answer = subprocess.run([*CLI, "what-if", str(folder), "--json"], check=True, capture_output=True, text=True)
    found = json.loads(answer.stdout)
    assert found["measured_step_s"] > 0
    assert {"2 hosts", "1 host"} & {change["change"] for change in found["changes"]}
    page = tmp_path / "page.html"
    asked = [*CLI, "what-if", str(folder), "--link", "2x", "--no-overlap", "--html", str(page)]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert "train.py on 2 workers" in told
    assert "Critical path: " in told
    assert page.read_text().count("<svg") == 6
    subprocess.run([*CLI, "report", str(folder), "--out", str(tmp_path / "out")], check=True, capture_output=True)
    shown = (tmp_path / "out" / "report.html").read_text()
    assert "Time of a step" in shown
    assert "DDP over Gloo (predicted)" in shown
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]


def test_a_page_of_a_run_is_written(tmp_path: Path) -> None:
    step = Planner(model_table("VGG19"), LAPTOP, Exchange()).predict()
    write_what_if(what_if(read_run(recorded(step, 4)), []), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Critical path, as it was" in page
    assert "e+" not in page
