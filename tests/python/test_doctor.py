"""What `poseidon doctor` concludes from flight records: from made ones, and from those of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import workers
from flight_records import link, record, waiting, write
from poseidon.cli.main import app
from poseidon.doctor import Verdict, diagnose, group, load
from poseidon.launch import free_port
from waiting import IN_PROGRAMS, end, meet, wait_until

WAITS = (waiting("w", 3, servers=(0,)),)
ALL_LINKS = tuple(link(rank) for rank in range(4))


def verdict_of(directory: Path, *records: dict[str, Any]) -> Verdict:
    (one,) = group(load([write(directory, *records)]))
    return diagnose(one)


def test_a_rank_that_ends_the_job_itself_is_named_with_its_reason(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        record(0, "told", 2, message="rank 2 on host-b ended the job: rank 2 failed: ValueError: no data"),
        record(
            2, "own", message="rank 2 on host-b ended the job: rank 2 failed: ValueError: no data; flight record: /x"
        ),
    )
    assert (verdict.kind, verdict.ranks) == ("exception", (2,))
    assert "rank 2 on host-b ended the job for a reason of its own: rank 2 failed: ValueError: no data" in verdict.text
    assert "flight record" not in verdict.text


def test_of_two_that_end_it_the_first_by_a_common_clock_counts(tmp_path: Path) -> None:
    both = [record(rank, "own", message=f"rank {rank} on h ended the job: E{rank}") for rank in (2, 3)]
    both[0]["monotonic_ns"] += 10_000_000_000
    verdict = verdict_of(tmp_path, *both)
    assert verdict.ranks == (3,)
    assert "E3" in verdict.text


def test_clocks_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    both = [record(rank, "own", message=f"rank {rank} on h ended the job: E{rank}") for rank in (1, 2)]
    verdict = verdict_of(tmp_path, *both)
    assert verdict.ranks == (1, 2)
    assert "not known" in verdict.text


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("rank 1 failed: Mismatch: ranks disagree on w", "mismatch"), ("rank 1 failed: interrupted", "interrupted")],
)
def test_some_reasons_have_a_kind_of_their_own(tmp_path: Path, reason: str, kind: str) -> None:
    verdict = verdict_of(tmp_path, record(1, "own", message=f"rank 1 on host-a ended the job: {reason}"))
    assert (verdict.kind, verdict.ranks) == (kind, (1,))


LOST = "rank 0 on host-a lost rank 1 on host-a (…): connection to x ended (Connection reset by peer); its process"


def test_a_rank_that_all_have_lost_and_that_left_no_record_died(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        record(0, "lost", 1, message=LOST, links=(link(1, connected=False),)),
        record(2, "lost", 1, message=LOST, links=(link(1, connected=False), link(0))),
        record(3, "told", 0, message=LOST),
    )
    assert (verdict.kind, verdict.ranks) == ("killed", (1,))
    assert "Connection reset by peer" in verdict.text
    assert "suspect the machine" not in verdict.text  # rank 0 is on it, too


def test_a_machine_without_any_record_is_suspected(tmp_path: Path) -> None:
    links = (link(2, connected=False), link(3, connected=False))
    verdict = verdict_of(tmp_path, *(record(rank, "lost", 2 + rank, message=LOST, links=links) for rank in (0, 1)))
    assert (verdict.kind, verdict.ranks) == ("killed", (2, 3))
    assert "of host-b no rank has left a record" in verdict.text


def test_a_machine_that_hears_nobody_accuses_nobody(tmp_path: Path) -> None:
    cut = LOST.replace(
        "Connection reset by peer); its process", "Connection timed out); this machine hears no other one"
    )
    links = (link(2, connected=False), link(3, connected=False))
    alone = [record(rank, "lost", 2, message=cut, links=links) for rank in (0, 1)]
    verdict = verdict_of(tmp_path / "own", *alone)
    assert (verdict.kind, verdict.ranks) == ("cut", (0, 1))
    assert "own cable" in verdict.text
    assert "died" not in verdict.text
    others = verdict_of(tmp_path / "all", *alone, record(2, "lost", 0, message=LOST), record(3, "told", 2))
    assert "between ranks 0, 1 on host-a and ranks 2, 3 on host-b" in others.text


def test_a_dedicated_server_that_died(tmp_path: Path) -> None:
    dead = [record(rank, "lost", message=LOST) for rank in range(4)]
    for one in dead:
        del one["server"]
        one["learnt"] = {"how": "lost", "party": "server", "index": 1}
    verdict = verdict_of(tmp_path, *dead)
    assert (verdict.kind, verdict.servers, verdict.ranks) == ("killed", (1,), ())


def test_two_sides_that_lost_each_other_are_cut_apart(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        record(0, "lost", 2, message=LOST),
        record(1, "told", 0, message=LOST),
        record(2, "lost", 1, message=LOST),
        record(3, "told", 2, message=LOST),
    )
    assert verdict.kind == "cut"
    assert "between ranks 0, 1 on host-a and ranks 2, 3 on host-b" in verdict.text


def test_two_sides_that_miss_what_the_other_has_sent_are_cut_apart(tmp_path: Path) -> None:
    others = {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}
    verdict = verdict_of(
        tmp_path,
        *(record(r, "silent", code="timeout", waits=WAITS, missing=others[r], links=ALL_LINKS) for r in range(4)),
    )
    assert verdict.kind == "cut"
    assert "between ranks 0, 1 on host-a and ranks 2, 3 on host-b" in verdict.text


def test_loss_in_one_direction_is_named_with_the_direction(tmp_path: Path) -> None:
    quiet = {"code": "timeout", "waits": WAITS, "links": ALL_LINKS}
    verdict = verdict_of(
        tmp_path,
        record(0, "silent", missing=(2,), **quiet),
        *(record(rank, "told", 0, **quiet) for rank in (1, 2, 3)),
    )
    assert verdict.kind == "path"
    assert "from rank 2 to rank 0" in verdict.text


def test_a_rank_that_is_connected_and_silent_is_frozen(tmp_path: Path) -> None:
    links = (link(1), link(3, silent_ms=9_000.0))
    verdict = verdict_of(
        tmp_path,
        record(0, "silent", code="timeout", waits=WAITS, missing=(3,), links=links),
        *(record(rank, "told", 0, code="timeout", waits=WAITS, links=(link(3),)) for rank in (1, 2)),
    )
    assert (verdict.kind, verdict.ranks) == ("frozen", (3,))


def test_a_frozen_rank_is_found_by_the_results_that_its_server_owes(tmp_path: Path) -> None:
    waits = (waiting("w", 3, servers=(3,)),)
    verdict = verdict_of(
        tmp_path, *(record(r, "silent", code="timeout", waits=waits, links=ALL_LINKS) for r in range(3))
    )
    assert (verdict.kind, verdict.ranks) == ("frozen", (3,))


def test_a_rank_that_did_not_start_is_late(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        record(0, "silent", code="timeout", waits=WAITS, missing=(1,)),
        record(1, "told", 0, code="timeout"),
        *(record(rank, "told", 0, code="timeout", waits=WAITS) for rank in (2, 3)),
    )
    assert (verdict.kind, verdict.ranks) == ("late", (1,))
    assert "layer 'w' in step 3" in verdict.text


def test_ranks_that_wait_for_different_layers(tmp_path: Path) -> None:
    verdict = verdict_of(
        tmp_path,
        record(0, "silent", code="timeout", waits=WAITS, missing=(1,)),
        record(1, "silent", code="timeout", waits=(waiting("v", 3, unit=2, servers=(1,)),)),
        *(record(rank, "told", 0, code="timeout", waits=WAITS) for rank in (2, 3)),
    )
    assert (verdict.kind, verdict.ranks) == ("diverged", (1,))
    assert "rank 1 waited for layer 'v'" in verdict.text


@pytest.mark.parametrize(
    ("how", "code", "kind"),
    [("left", "peer_lost", "left"), ("refused", "refused", "refused"), ("found", "mismatch", "mismatch")],
)
def test_other_causes(tmp_path: Path, how: str, code: str, kind: str) -> None:
    verdict = verdict_of(tmp_path, record(0, how, 1, code=code), record(1, "told", 0, code=code))
    assert verdict.kind == kind
    assert 1 in verdict.ranks


def test_ranks_that_never_met_name_those_without_a_record(tmp_path: Path) -> None:
    lonely = [
        record(rank, "found", code="timeout", message="rank 0 waited 5 ms for rank 3", phase="meeting", run="")
        for rank in (0, 1, 2)
    ]
    verdict = verdict_of(tmp_path, *lonely)
    assert (verdict.kind, verdict.ranks) == ("absent", (3,))


def test_a_teller_whose_record_is_missing_is_asked_for(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, record(0, "told", 3, message="the first words"), record(1, "told", 3))
    assert (verdict.kind, verdict.ranks) == ("unknown", (3,))
    assert "give its record" in verdict.text


def test_failures_are_told_apart(tmp_path: Path) -> None:
    server = record(-1, "lost", 1, process="server", run="", wall_s=1003.0)
    write(tmp_path, record(0, "lost", 1), record(0, "lost", 1, run="bb", wall_s=2000.0), record(2, "told", 0), server)
    first, second = group(load([tmp_path]))
    assert [(one.process, one.rank) for one in first] == [("worker", 0), ("worker", 2), ("server", None)]
    assert [one.run for one in second] == ["bb"]


def doctor(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "not JSON"),
        ("[]", "no flight record"),
        ('{"format": "poseidon flight record", "format_version": 99}', "another version"),
        ('{"format": "poseidon flight record", "format_version": 1}', "damaged"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "poseidon-x.json").write_text(content)
    code, output = doctor(str(tmp_path / "poseidon-x.json"))
    assert code == 2
    assert word in " ".join(output.replace("│", " ").split())


def test_a_missing_file_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        assert doctor(str(path))[0] == 2


def test_the_newest_failure_of_the_default_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, record(0, "lost", 1), record(0, "told", 1, run="bb", wall_s=2000.0))
    monkeypatch.setenv("POSEIDON_FLIGHT_RECORD", str(tmp_path))
    code, output = doctor("--json")
    assert code == 0
    assert [one["run"] for one in json.loads(output)] == ["bb"]
    code, output = doctor()
    assert code == 0
    assert "Verdict: " in output
    monkeypatch.setenv("POSEIDON_FLIGHT_RECORD", "off")
    assert doctor()[0] == 2


SCRIPT = """
    import os
    import numpy as np
    import poseidon

    mode, rank = sys.argv[1], int(os.environ["RANK"])
    with poseidon.connect() as exchange:
        array = np.zeros(11 if mode == "mismatch" and rank == 1 else 10, np.float32)
        exchange.declare({"w": array})
        for step in range(10**9):
            if step == 1:
                print("ready", flush=True)
            if step == 3 and rank == 1 and mode == "exception":
                raise ValueError("the data of rank one is broken")
            if step == 3 and rank == 1 and mode == "late":
                compute_for(3)
            exchange.push_pull("w", array)
"""


def fail(tmp_path: Path, mode: str) -> dict[str, Any]:
    """Lets rank 1 of three processes fail in a way; what the doctor says of their records."""
    script = tmp_path / "exchange.py"
    script.write_text(IN_PROGRAMS + textwrap.dedent(SCRIPT))
    records = tmp_path / "records"
    port = free_port()
    options = {"POSEIDON_FLIGHT_RECORD": str(records), "POSEIDON_TIMEOUT": "1.5"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), mode],
            env={**os.environ, **workers.job_variables(rank, 3, port), **options},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        if mode in ("killed", "frozen"):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            processes[1].send_signal(signal.SIGKILL if mode == "killed" else signal.SIGSTOP)
        for rank in (0, 2):
            _, errors = processes[rank].communicate(timeout=20)
            assert processes[rank].returncode != 0
            assert f"flight record: {records}" in errors or mode == "mismatch"
        if mode == "frozen":
            processes[1].kill()
        processes[1].communicate(timeout=20)
    finally:
        end(*processes)
    code, output = doctor("--json", str(records))
    assert code == 0, output
    (one,) = json.loads(output)
    return one


@pytest.mark.parametrize(
    ("mode", "kind", "recorded"),
    [
        ("killed", "killed", [0, 2]),
        ("frozen", "frozen", [0, 2]),
        ("exception", "exception", [0, 1, 2]),
        ("late", "late", [0, 1, 2]),
    ],
)
def test_the_rank_that_really_started_it_is_named(tmp_path: Path, mode: str, kind: str, recorded: list[int]) -> None:
    one = fail(tmp_path, mode)
    assert [part["rank"] for part in one["records"]] == recorded
    assert one["verdict"]["kind"] == kind, one["verdict"]
    assert one["verdict"]["ranks"] == [1]


def test_ranks_that_really_disagree_are_found_out(tmp_path: Path) -> None:
    one = fail(tmp_path, "mismatch")
    assert one["verdict"]["kind"] == "mismatch", one["verdict"]


def alone_but_one(folder: Path) -> str:
    import poseidon

    exchange = poseidon.connect()
    meet(folder, exchange.rank, 3)
    if exchange.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert exchange.failure is None or exchange.failure.code == "peer_lost"
    failure = wait_until(lambda: exchange.failure, "the failure", 5)
    return f"{type(failure).__name__}: {failure}"


def test_a_failure_can_be_seen_without_waiting(tmp_path: Path) -> None:
    answers = workers.run_fresh(3, alone_but_one, tmp_path, POSEIDON_FLIGHT_RECORD=str(tmp_path))
    assert answers[1] is None
    for answer in (answers[0], answers[2]):
        assert answer.startswith("PeerLost: ")
        assert "rank 1 on " in answer
