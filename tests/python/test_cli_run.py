"""The launcher behind `poseidon run`: environment, output, failures, signals, and that no process is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from poseidon import testbed
from poseidon.errors import InvalidArgument
from poseidon.launch import Failure, free_port, launch, run_workers
from poseidon.launch.lines import MOST_LINE_BYTES, Lines
from poseidon.options import available_cpu_count
from waiting import IN_PROGRAMS, end, runs, wait_until

POSEIDON = [sys.executable, "-m", "poseidon"]
SLEEPER = f"""{IN_PROGRAMS}
import os, pathlib
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
stay()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes the text of a worker and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "worker.py"
        path.write_text(text)
        return str(path)

    return write


def collect(command: list[str], count: int, **arguments: object) -> tuple[list[int], dict[int, list[str]]]:
    """The exit codes and the lines of each rank."""
    lines: dict[int, list[str]] = {rank: [] for rank in range(count)}
    codes = launch(command, count, on_line=lambda rank, text: lines[rank].append(text), **arguments)  # type: ignore[arg-type]
    return codes, lines


def start_sleepers(
    script: Callable[[str], str], folder: Path, count: int, under: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], list[int]]:
    """A `poseidon run` whose workers all sleep, and their pids."""
    process = subprocess.Popen(
        [*under, *POSEIDON, "run", "-n", str(count), script(SLEEPER), str(folder)], stderr=subprocess.PIPE, text=True
    )
    files = [folder / str(rank) for rank in range(count)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in files), "the workers")
    return process, [int(path.read_text()) for path in files]


def test_every_worker_finds_its_place(script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR POSEIDON_SCHEME TORCHELASTIC_USE_AGENT_STORE A"
    text = f"import os\nfor n in '{names}'.split(): print(os.environ.get(n))\n"
    text += "print(os.environ['MASTER_PORT'], os.environ['OMP_NUM_THREADS'])"
    codes, lines = collect([sys.executable, script(text)], 3, env={"A": "b"}, options={"scheme": "sfb"})
    assert codes == [0, 0, 0]
    for rank in range(3):
        assert lines[rank][:-1] == [str(rank), "3", str(rank), "3", "127.0.0.1", "sfb", "None", "b"]
    assert len({lines[rank][-1] for rank in range(3)}) == 1
    port, threads = lines[0][-1].split()
    assert 20000 <= int(port) < 30000
    assert int(threads) == max(1, available_cpu_count() // 3)


def test_processes_with_one_seed_take_different_ports() -> None:
    chosen = []
    for _ in range(3):
        random.seed(7)
        chosen.append(free_port())
    assert len(set(chosen)) > 1


def test_command_line_beats_the_environment(script: Callable[[str], str]) -> None:
    path = script("from poseidon.options import resolve\ns = resolve()\nprint(s.rank, s.chunk_bytes, s.timeout)")
    done = subprocess.run(
        [*POSEIDON, "run", "-n", "2", "--chunk-bytes", "4k", path],
        env={**os.environ, "POSEIDON_CHUNK_BYTES": "1MiB", "POSEIDON_TIMEOUT": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["0 4096 7.0", "[1] 1 4096 7.0"]


def test_output_is_prefixed_except_of_rank_zero(script: Callable[[str], str]) -> None:
    # In one call each: what print() writes in pieces to the shared output may have another rank's line in between.
    path = script("import sys\nsys.stdout.write(f'out {sys.argv[1:]}\\n')\nsys.stderr.write('err\\n')")
    done = subprocess.run(
        [*POSEIDON, "run", "-n", "2", path, "--lr", "3", "-n"], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["[1] out ['--lr', '3', '-n']", "out ['--lr', '3', '-n']"]
    assert sorted(done.stderr.splitlines()) == ["[1] err", "err"]


def test_module(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    done = subprocess.run(
        [*POSEIDON, "run", "-m", "trainer", "-m"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "__main__ ['-m']\n"


def test_lines_of_progress_bars_and_long_lines() -> None:
    given: list[str] = []
    lines = Lines(given.append)
    for piece in (b"10%\r", b"20%\r", b"90%\rdo", b"ne\nne", b"xt\r\n", b"caf\xc3", b"\xa9\n", b"no newline"):
        lines.feed(piece)
    lines.close()
    assert given == ["done", "next", "café", "no newline"]
    lines.feed(b"x" * (MOST_LINE_BYTES + 1))
    assert len(given[-1]) == MOST_LINE_BYTES + 1


@pytest.mark.parametrize(
    ("death", "status", "message"),
    [
        ("sys.exit(3)", 3, "rank 1 failed first, with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first, killed by SIGKILL"),
    ],
)
def test_first_failure_is_named(
    script: Callable[[str], str], tmp_path: Path, death: str, status: int, message: str
) -> None:
    # Rank 2 notices and ends with another error, as workers normally do.
    path = script(
        f"{IN_PROGRAMS}import os, pathlib\nrank, pid = os.environ['RANK'], pathlib.Path(sys.argv[1], 'pid')\n"
        f"if rank == '1':\n    pid.write_text(str(os.getpid()))\n    {death}\n"
        "one = wait_until(lambda: pid.exists() and pid.read_text(), 'rank 1')\n"
        "wait_until(lambda: not pathlib.Path('/proc', one).exists(), 'the launcher to see the end of rank 1')\n"
        "sys.exit(7 if rank == '2' else 0)"
    )
    command = [*POSEIDON, "run", "-n", "3", path, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert f"poseidon: {message}\n" in done.stderr


FAILING = f"""{IN_PROGRAMS}
import os, pathlib, signal
import poseidon

how, rank, pids = sys.argv[1], int(os.environ["RANK"]), pathlib.Path(sys.argv[2])
(pids / str(rank)).write_text(str(os.getpid()))

class Slow(ValueError):  # the others have ended when it has been shown
    def __str__(self):
        happens(lambda: not any(runs(int((pids / other).read_text())) for other in "02"), 1)
        return "the data of rank one is broken"

def fail():
    if how == "raises":
        raise Slow()
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(5)

exchange = poseidon.connect()
try:
    for step in range(1000):
        if rank == 1 and step == 3:
            fail()
        exchange.barrier()
except poseidon.errors.PoseidonError as error:
    if rank == 0:
        raise RuntimeError("the trainer has failed") from error
    sys.exit(9)
"""


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("raises", 1, "rank 1 failed first, with exit code 1"),
        ("is killed", 137, "rank 1 failed first, killed by SIGKILL"),
        ("exits", 5, "rank 1 failed first, with exit code 5"),
    ],
)
def test_first_is_whose_failure_the_others_have_heard_of(
    script: Callable[[str], str], tmp_path: Path, how: str, status: int, message: str
) -> None:
    command = [*POSEIDON, "run", "-n", "3", script(FAILING), how, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert f"poseidon: {message}\n" in done.stderr, done.stderr
    assert done.returncode == status


def test_workers_that_ignore_everything_are_killed(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("poseidon.launch.run.GRACE_SECONDS", 0.5)
    path = script(
        f"{IN_PROGRAMS}import os, pathlib, signal\nrank, folder = os.environ['RANK'], pathlib.Path(sys.argv[1])\n"
        "if rank == '0':\n    wait_for(folder / '1', folder / '2')\n    sys.exit(4)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "if rank == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(folder / rank).touch()\nstay()"
    )
    outcome = run_workers([sys.executable, path, str(tmp_path)], 3)
    assert outcome.codes == [4, -signal.SIGKILL, -signal.SIGTERM]
    assert outcome.first_failure == Failure(0, 4)
    assert outcome.exit_status == 4
    assert "were ended: 1, 2" in capfd.readouterr().err


def test_what_a_worker_started_ends_with_it(script: Callable[[str], str], tmp_path: Path) -> None:
    path = script(
        "import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'child').write_text(str(child.pid))"
    )
    assert launch([sys.executable, path], 1) == [0]
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not runs(child), "the end of what it has started", 5)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_all_workers(
    script: Callable[[str], str], tmp_path: Path, number: signal.Signals, status: int
) -> None:
    process, pids = start_sleepers(script, tmp_path, 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status
    assert errors.count("KeyboardInterrupt") == 3  # forwarded as Ctrl-C, so that workers can clean up
    assert "failed first" not in errors
    assert not any(runs(pid) for pid in pids)


def test_a_terminal_that_closes_ends_all_workers(script: Callable[[str], str], tmp_path: Path) -> None:
    process, pids = start_sleepers(script, tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGHUP
    assert not any(runs(pid) for pid in pids)


def test_nohup_lets_workers_outlive_the_terminal(script: Callable[[str], str], tmp_path: Path) -> None:
    process, pids = start_sleepers(script, tmp_path, 2, under=["nohup"])
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert all(runs(pid) for pid in pids)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_killing_the_launcher_ends_the_workers(script: Callable[[str], str], tmp_path: Path) -> None:
    process, pids = start_sleepers(script, tmp_path, 2)
    end(process)
    wait_until(lambda: not any(runs(pid) for pid in pids), "the end of the workers", 10)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": ["no-such-program"], "count": 1}, "rank 0 cannot be started: 'no-such-program'"),
        ({"command": ["true"], "count": 0}, "the number of workers is 0"),
        ({"command": ["true"], "count": 1, "link": "fast"}, "the link rate is 'fast'"),
        ({"command": ["true"], "count": 1, "options": {"scheme": "tcp"}}, "--scheme is 'tcp'"),
        ({"command": ["true"], "count": 1, "options": {"secret_file": "/no/file"}}, "the secret_file /no/file cannot"),
        ({"command": ["true"], "count": 1, "env": {"POSEIDON_SECRET": "short"}}, "POSEIDON_SECRET has a secret of 5"),
        ({"command": ["true"], "count": 1, "env": {"POSEIDON_FLOWS": "many"}}, "POSEIDON_FLOWS is 'many'"),
        ({"command": ["true"], "count": 1, "options": {"dscp": "46,34,0"}}, "dscp has 3 code points and priority_cl"),
    ],
)
def test_what_cannot_be_started(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidArgument, match="^" + expected):
        launch(**arguments)  # type: ignore[arg-type]


def test_a_configuration_file_is_read_before_workers_are_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("poseidon.toml").write_text('flows = "many"')
    with pytest.raises(InvalidArgument, match=r"^flows in poseidon.toml is 'many'"):
        launch(["true"], 1)


def test_a_script_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([*POSEIDON, "run", "-n", "2", str(tmp_path / "no.py")], capture_output=True, text=True)
    assert ended.returncode == 1
    assert (
        ended.stderr
        == f"poseidon: there is no script {tmp_path / 'no.py'}: give its path, or the name of a module with -m\n"
    )


def test_link_without_rights_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(testbed.TestbedError, match=r"needs root rights and the command ip .* and the command tc"):
        launch(["true"], 2, "100mbit")
