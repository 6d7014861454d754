"""Watching workers: what they show of themselves, `poseidon top`, `poseidon metrics` and the dashboard."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import poseidon.torch as poseidon
import workers
from forked import FORK
from poseidon import live
from poseidon.admin import Address, AdminServer
from poseidon.cli.main import app
from poseidon.errors import InvalidArgument, PoseidonError, Refused, Unreachable
from poseidon.live import Board, LayerFigures, LinkFigures, LinkMeter, WorkerFigures, read_boards
from poseidon.torch.process.context import context
from poseidon.watch import Lateness, WatchService, fetch, is_silent, latest_worker, metrics_text
from waiting import compute_for, end

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json"
NAMES = ["fc2.weight", "fc1.weight", "conv.weight"]


def worker(rank: int, seconds: list[float], **changes: Any) -> WorkerFigures:
    """Figures with these times of exchange, in the order of backward."""
    figures = WorkerFigures(
        job="a job",
        run="5c1f",
        rank=rank,
        world_size=3,
        generation=2,
        host="node1",
        pid=77,
        written_at=time.time(),
        step=64,
        step_s=0.1,
        stall_s=0.02,
        stalled_total_s=1.5,
        bytes_sent=10_000,
        bytes_received=20_000,
        plain_bytes_sent=12_500,
        plain_bytes_received=25_000,
        layers=tuple(
            LayerFigures(name, "sfb" if "fc" in name else "ps", 100, 50, s)
            for name, s in zip(NAMES, seconds, strict=True)
        ),
        links=(LinkFigures("10.0.0.2", 9e8, 0.001, 3), LinkFigures("10.0.0.3", None, 0.002, 0)),
    )
    return replace(figures, **changes)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live, "_base", lambda: tmp_path)
    return tmp_path


def hold_board(folder: Path, figures: WorkerFigures | None, pipe: Any) -> None:
    live._base = lambda: folder
    mine = Board()
    if figures is not None:
        mine.write(figures)
    pipe.send("written")
    while pipe.poll(None) and (figures := pipe.recv()) is not None:
        mine.write(figures)
        pipe.send("written")
    mine.close()


class Shown:
    """A process with a board."""

    def __init__(self, figures: WorkerFigures | None) -> None:  # with the fixture `base`
        self.pipe, there = FORK.Pipe()
        self.process = FORK.Process(target=hold_board, args=(live._base(), figures, there), daemon=True)
        self.process.start()
        assert self.pipe.recv() == "written"

    def write(self, figures: WorkerFigures) -> None:
        self.pipe.send(figures)
        assert self.pipe.recv() == "written"

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join(20)

    def vanish(self) -> None:
        end(self.process)


# The board.


def test_a_board_is_read_until_its_process_ends(base: Path) -> None:
    assert read_boards() == []
    first, second = worker(1, [0.1, 0.2, 0.3]), worker(0, [0.3, 0.2, 0.1])
    shown = [Shown(first), Shown(second), Shown(None)]
    try:
        assert read_boards() == [second, first]
        changed = replace(first, step=128, layers=first.layers[:1])  # shorter than before
        shown[0].write(changed)
        assert read_boards() == [second, changed]
        shown[0].end()
        assert read_boards() == [second]
        shown[1].vanish()
        assert read_boards() == []
        folder = base / f"poseidon-{os.getuid()}"
        assert len(list(folder.iterdir())) == 2  # of the process that was killed, and of the one without figures
        assert folder.stat().st_mode & 0o777 == 0o700
        Board().close()
        assert len(list(folder.iterdir())) == 1
    finally:
        for one in shown:
            one.vanish()


def test_a_folder_that_others_may_write_to_is_not_used(base: Path) -> None:
    folder = base / f"poseidon-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to it"):
        Board()
    (folder / "1-abc").write_text("00000000\n")
    assert read_boards() == []


def test_half_written_figures_are_not_read(base: Path) -> None:
    shown = Shown(worker(0, [0.1, 0.2, 0.3]))
    try:
        (path,) = (base / f"poseidon-{os.getuid()}").iterdir()
        path.write_bytes(path.read_bytes()[:-1])
        assert read_boards() == []
    finally:
        shown.vanish()


# Links.


def links_before_and_after_much() -> list[tuple[LinkFigures, ...]]:
    meter = LinkMeter()
    before = meter.links()
    with socket.create_server(("127.0.0.9", 0)) as server, socket.create_connection(server.getsockname()):
        model = poseidon.DistributedDataParallel(nn.Linear(1000, 2000), scheme="ps")
        for _ in range(3):
            model(torch.ones(1, 1000)).sum().backward()
        return [before, meter.links()]


def test_links_are_those_of_poseidons_own_connections() -> None:
    before, after = workers.run(2, links_before_and_after_much, transport="tcp")[0]
    assert all(link.bits_per_s is None for link in before)
    (link,) = after
    assert link.peer == "127.0.0.1", "the program's own sockets are left out"
    assert link.bits_per_s is not None
    assert link.bits_per_s > 1e6
    assert 0 < link.round_trip_s < 5


# Who is late.


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # Rank 1 waits least for everything: it began late.
        ([[0.05, 0.06, 0.07], [0.01, 0.02, 0.03], [0.05, 0.06, 0.07]], Lateness(1, 0.04, "")),
        # Rank 2 falls behind where it makes the gradient of the second layer.
        ([[0.05, 0.06, 0.07], [0.05, 0.06, 0.07], [0.05, 0.01, 0.02]], Lateness(2, 0.05, "fc1.weight")),
        # What differs is within 5 % of a step.
        ([[0.05, 0.06, 0.07], [0.049, 0.058, 0.07], [0.05, 0.06, 0.069]], None),
    ],
)
def test_who_waits_least_is_late(times: list[list[float]], expected: Lateness | None) -> None:
    found = latest_worker([worker(rank, seconds) for rank, seconds in enumerate(times)])
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.rank, found.layer) == (expected.rank, expected.layer)
        assert found.seconds == pytest.approx(expected.seconds)


def test_one_worker_is_not_late() -> None:
    assert latest_worker([worker(0, [0.1, 0.1, 0.1])]) is None


# Real workers.


def trained_slowly(late_rank: int, seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    poseidon.init(transport="tcp", job="watched")
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    model = poseidon.DistributedDataParallel(layers, scheme={"2": "sfb", "*": "ps"})
    for step in range(33):
        if step and poseidon.rank() == late_rank:
            compute_for(seconds)
        model(torch.ones(4, 64)).sum().backward()
    latest = context().meter.latest
    poseidon.barrier()
    seen = subprocess.run(
        [sys.executable, "-m", "poseidon", "top", "--json"], capture_output=True, text=True, check=True
    ).stdout
    poseidon.barrier()
    return poseidon.scalars(), {"latest": asdict(latest), "seen": json.loads(seen)}


def test_workers_show_their_steps() -> None:
    answers = workers.run_fresh(2, trained_slowly, 1, 0.02)
    latest = [WorkerFigures.from_json(answer["latest"]) for _, answer in answers]
    assert [one.rank for one in latest] == [0, 1]
    assert latest[0].step == latest[1].step == 32  # a power of two, the same on all
    assert all(one.step_s > 0.015 for one in latest)
    assert latest[0].stall_s > 0.01 > latest[1].stall_s  # rank 0 waits for rank 1
    assert set(latest[0].bytes_by_scheme) == {"ps", "sfb"}
    assert all(one.bytes_sent > 0 for one in latest)
    assert [layer.name for layer in latest[0].layers][-1] in ("0.bias", "0.weight")
    late = latest_worker(latest)
    assert late is not None
    assert (late.rank, late.layer) == (1, "")
    for scalars, answer in answers:
        seen = [one for one in answer["seen"] if one["job"] == "watched"]
        assert [(one["rank"], one["step"]) for one in seen] == [(0, 32), (1, 32)]
        assert scalars["poseidon/step_seconds"] > 0.015
        assert scalars["poseidon/step_bytes/sfb"] > 0
    assert not [one for one in read_boards() if one.job == "watched"]


def averaged_now_and_then() -> dict[str, Any]:
    poseidon.init(transport="tcp", job="averaged")
    model = nn.Linear(64, 8)
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4)
    for step in range(10):
        compute_for(0.02 * (step >= 8 and poseidon.rank() == 1))
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    optimizer.average()
    optimizer.average()  # nothing is left
    return asdict(context().meter.latest)


def test_workers_of_local_sgd_show_their_steps() -> None:
    latest = [WorkerFigures.from_json(answer) for answer in workers.run_fresh(2, averaged_now_and_then)]
    assert [one.step for one in latest] == [10, 10], "every step counts, and figures come with averagings"
    assert [layer.name for layer in latest[0].layers] != []
    assert sum(layer.bytes_sent for one in latest for layer in one.layers) > 0
    assert latest[0].stall_s > 0.005 > latest[1].stall_s, "rank 0 waits for rank 1"


def alone() -> dict[str, float]:
    poseidon.init()
    return poseidon.scalars()


def test_one_worker_has_no_scalars() -> None:
    assert workers.run_fresh(1, alone) == [{}]


# The commands.


def top(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_top_prints_a_table(base: Path) -> None:
    assert "No worker of this user trains on this machine" in top()
    shown = [
        Shown(worker(0, [0.05, 0.06, 0.07])),
        Shown(worker(1, [0.01, 0.02, 0.03])),
        Shown(worker(2, [0.05, 0.06, 0.07], written_at=time.time() - 60)),
    ]
    try:
        text = top("--once")
        assert "job a job, generation 2: 3 of 3 workers" in text
        assert "20.0 ms (20 %)" in text
        assert "10.0.0.2 900mbit, 3 resent" in text
        assert "40.0 ms, before the first gradient" in text
        assert re.search(r"silent for 6\d s", text)  # the command takes a while to start
        assert [one["rank"] for one in json.loads(top("--json"))] == [0, 1, 2]
    finally:
        for one in shown:
            one.vanish()


def test_silence_is_longer_than_a_step() -> None:
    late = {"written_at": time.time() - 20}
    assert is_silent(worker(0, [0.1] * 3, **late))
    assert not is_silent(worker(0, [0.1] * 3, step_s=10.0, **late))


def served(figures: list[WorkerFigures], token: str | None = None, address: str = "0") -> AdminServer:
    return AdminServer(WatchService(lambda: figures), Address.parse(address), token)


def test_other_machines_workers_are_asked_over_http() -> None:
    first, second = [worker(1, [0.1] * 3)], [worker(0, [0.2] * 3)]
    servers = [served(first), served(second, "secret")]
    try:
        addresses = [server.address for server in servers]
        assert fetch(addresses, "secret") == [second[0], first[0]]
        with pytest.raises(Refused, match="the admin port needs its token"):
            fetch(addresses, None)
        assert json.loads(top(str(addresses[0]), "--json"))[0]["rank"] == 1
    finally:
        for server in servers:
            server.close()
    with pytest.raises(Unreachable, match="start `poseidon metrics --admin PORT` there"):
        fetch(addresses, None)


def test_another_version_is_named() -> None:
    class Other(WatchService):
        def answer(self, *request: Any) -> Any:
            return replace(super().answer(*request), text='{"workers": [{"rank": 0}]}')

    server = AdminServer(Other(lambda: []), Address.parse("0"), None)
    try:
        with pytest.raises(PoseidonError, match="no `poseidon metrics` of this version"):
            fetch([server.address], None)
    finally:
        server.close()


def test_beyond_the_machine_a_token_is_needed() -> None:
    with pytest.raises(InvalidArgument, match="which could read the figures of every job: give it a token"):
        served([], address="0.0.0.0:0")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/healthz", 200), ("POST", "/metrics", 405), ("GET", "/jobs", 404), ("GET", "/metrics", 401)],
)
def test_answers(method: str, path: str, status: int) -> None:
    server = served([], "secret")
    try:
        connection = http.client.HTTPConnection(server.address.host, server.address.port, timeout=20)
        headers = {} if status in (200, 401) else {"Authorization": "Bearer secret"}
        connection.request(method, path, headers=headers)
        assert connection.getresponse().status == status
        connection.close()
    finally:
        server.close()


def test_metrics_is_a_service_that_a_signal_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "poseidon", "metrics", "--admin", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://(\S+)/metrics", process.stdout.readline())
            assert address is not None
            connection = http.client.HTTPConnection(address[1], timeout=20)
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            assert response.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
            assert "# TYPE poseidon_worker_steps_total counter" in response.read().decode()
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            end(process)


# Prometheus and Grafana.


def test_metrics_have_labels_and_values() -> None:
    text = metrics_text([worker(0, [0.1, 0.2, 0.3]), worker(1, [0.3, 0.2, 0.1], job='"x"')])
    assert 'poseidon_worker_step_seconds{job="a job",run="5c1f",rank="0"} 0.1' in text
    assert 'poseidon_worker_steps_total{job="\\"x\\"",run="5c1f",rank="1"} 64' in text
    assert 'poseidon_worker_step_bytes{job="a job",run="5c1f",rank="0",scheme="sfb"} 300' in text
    layer = 'poseidon_layer_exchange_seconds{job="a job",run="5c1f",rank="0",layer="conv.weight",scheme="ps"} 0.3'
    assert layer in text
    assert 'poseidon_link_bits_per_second{job="a job",run="5c1f",rank="0",peer="10.0.0.2"} 900000000.0' in text
    assert 'poseidon_link_bits_per_second{job="a job",run="5c1f",rank="0",peer="10.0.0.3"}' not in text
    assert 'poseidon_link_resent_packets_total{job="a job",run="5c1f",rank="0",peer="10.0.0.2"} 3' in text


def test_the_dashboard_uses_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    text = metrics_text([worker(0, [0.1, 0.2, 0.3])])
    samples = re.findall(r"^(\w+)\{(.*)\}", text, re.MULTILINE)
    known = {name: set(re.findall(r"(\w+)=", labels)) for name, labels in samples}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= 6
    used = set()
    for expression in expressions:
        names = re.findall(r"\bposeidon_\w+", expression)
        assert names, expression
        used |= set(names)
        for name in names:
            assert name in known, name
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            assert {label.strip() for label in group.split(",")} <= known[names[0]], expression
    titles = {panel["title"] for panel in dashboard["panels"]}
    assert {"Step time", "Stall", "Bytes of a step, by scheme", "Slowest link"} <= titles
    assert used >= {"poseidon_worker_step_seconds", "poseidon_worker_stall_seconds", "poseidon_layer_exchange_seconds"}
