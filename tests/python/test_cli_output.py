"""What `poseidon run` does with output that it cannot read or write, and with failures and mistakes of its users."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from waiting import IN_PROGRAMS, end, runs, steady, wait_for, wait_until

POSEIDON = [sys.executable, "-m", "poseidon"]


def run(folder: Path, text: str, *arguments: str, **more: object) -> subprocess.CompletedProcess[bytes]:
    script = folder / "worker.py"
    script.write_text(text)
    command = [str(script) if argument == "SCRIPT" else argument for argument in arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, "check": False, **more}
    return subprocess.run([*POSEIDON, "run", *command], **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_bytes_of_any_kind_pass(encoding: str, tmp_path: Path) -> None:
    text = "import sys\nsys.stdout.buffer.write(b'caf\\xe9 \\xe2\\x82\\xac\\n')"
    done = run(tmp_path, text, "-n", "2", "SCRIPT", env={**os.environ, "PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [b"[1] caf\xe9 \xe2\x82\xac", b"caf\xe9 \xe2\x82\xac"]


def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    text = f"import os, pathlib\nif os.environ['RANK'] == '0':\n    pathlib.Path({str(tmp_path)!r}, 'end').touch()\n"
    text += "else:\n    for line in range(20): print(line)\n"
    with open("/dev/full", "wb") as full:
        done = run(tmp_path, text, "-n", "2", "SCRIPT", stdout=full)
    assert done.returncode == 0
    assert done.stderr.count(b"output of workers is lost, because it cannot be written") == 1
    assert (tmp_path / "end").exists()


UNREAD = f"""{IN_PROGRAMS}
import os, pathlib
rank = os.environ["RANK"]
pathlib.Path(sys.argv[1], rank).write_text(str(os.getpid()))
while rank in sys.argv[2]:
    print("x" * 200)
wait_for(pathlib.Path(sys.argv[1], "go on"))
if rank == "2":
    sys.exit(3)
stay()
"""


def start_unread(folder: Path, talkers: str) -> subprocess.Popen[bytes]:
    """A run of three workers, of which the talkers write more than a pipe takes. It returns when that is full."""
    (script := folder / "worker.py").write_text(UNREAD)
    (own := folder / "own").mkdir()
    process = subprocess.Popen(
        [*POSEIDON, "run", "-n", "3", str(script), str(folder), talkers],
        env={**os.environ, "TMPDIR": str(own)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_for(*(folder / str(rank) for rank in range(3)))
    wait_until_full(process)
    return process


def wait_until_full(process: subprocess.Popen[Any]) -> None:
    """Waits until the pipe of its output takes no more."""
    wait_until(lambda: waiting_bytes(process) > 0, "output")
    steady(lambda: waiting_bytes(process), pause=0.3)
    assert process.poll() is None


def waiting_bytes(process: subprocess.Popen[Any]) -> int:
    """How many bytes of its output nobody has read."""
    assert process.stdout is not None
    return struct.unpack("i", fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def have_ended(folder: Path) -> bool:
    """All three workers."""
    return not any(runs(int((folder / str(rank)).read_text())) for rank in range(3))


@pytest.mark.parametrize("talkers", ["1", "12", "012"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_whose_output_nobody_reads(tmp_path: Path, talkers: str, number: signal.Signals) -> None:
    process = start_unread(tmp_path, talkers)
    assert len(os.listdir(tmp_path / "own")) == 1
    began = time.monotonic()
    process.send_signal(number)
    try:
        # Rank 0 writes to the pipe itself, and has to be told a second time, 5 s after the first.
        assert process.wait(20) == 128 + number
        assert time.monotonic() - began < (10 if "0" in talkers else 4)
    finally:
        end(process)
    assert have_ended(tmp_path)
    assert os.listdir(tmp_path / "own") == []


def test_a_failure_ends_the_other_workers_although_nobody_reads(tmp_path: Path) -> None:
    process = start_unread(tmp_path, "1")
    (tmp_path / "go on").touch()
    try:
        wait_until(lambda: have_ended(tmp_path), "the workers' end", 20)
        text, _ = process.communicate(timeout=20)
    finally:
        end(process)
    assert process.returncode == 3
    assert b"poseidon: rank 2 failed first, with exit code 3" in text


def test_a_reader_that_comes_late_gets_everything(tmp_path: Path) -> None:
    (script := tmp_path / "worker.py").write_text(
        "import os\nfor line in range(200_000 * int(os.environ['RANK'])): print(line)"
    )
    with subprocess.Popen([*POSEIDON, "run", "-n", "2", str(script)], stdout=subprocess.PIPE, text=True) as process:
        wait_until_full(process)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines() == [f"[1] {line}" for line in range(200_000)]


FAILING = """
import os
import pty
import poseidon
exchange = poseidon.connect(flight_record="off")
exchange.barrier()
if os.environ["RANK"] == "1":
    raise ValueError("the data of rank one is broken")
exchange.barrier()
"""


def test_a_failure_is_printed_once_and_its_cause_comes_last(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING, "-n", "3", "SCRIPT")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1
    assert lines[-2:] == [
        "poseidon: rank 1 failed first, with exit code 1",
        "poseidon: the cause: ValueError: the data of rank one is broken",
    ]
    assert sum("Traceback" in line for line in lines) == 1
    assert sum("ValueError: the data" in line for line in lines) == 2  # in the traceback and in the last line


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("open('/no/such/file')", "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"),
        ("import sys\nsys.exit('no data: download it first\\n')", "no data: download it first"),
    ],
)
def test_the_cause_is_the_last_line_of_a_rank_that_never_joined(text: str, cause: str, tmp_path: Path) -> None:
    lines = run(tmp_path, text, "-n", "2", "SCRIPT").stderr.decode().splitlines()
    assert lines[-2] in [f"poseidon: rank {rank} failed first, with exit code 1" for rank in (0, 1)]
    assert lines[-1] == f"poseidon: the cause, by its last line: {cause}"


def test_what_a_killed_rank_wrote_is_no_cause(tmp_path: Path) -> None:
    text = "import os, sys\nprint('a warning', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)"
    assert run(tmp_path, text, "SCRIPT").stderr.decode().splitlines() == [
        "a warning",
        "poseidon: rank 0 failed first, killed by SIGKILL",
    ]


def test_on_a_terminal_rank_zero_writes_to_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        run(tmp_path, "import sys\nsys.exit(f'terminal: {sys.stderr.isatty()}')", "SCRIPT", stderr=theirs)
        lines = os.read(ours, 10_000).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    assert lines == [
        "terminal: True",
        "poseidon: rank 0 failed first, with exit code 1",
        "poseidon: the cause: see what rank 0 has written above",
    ]


INTERRUPTED = f"""{IN_PROGRAMS}
import os, pathlib
try:
    pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
    stay()
except KeyboardInterrupt:
    for letter in "whole" * 20:
        print(letter, end="", file=sys.stderr, flush=True)
        compute_for(0.002)
    print(file=sys.stderr)
"""


def test_an_interrupted_run_says_so_last_and_tears_no_line(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(INTERRUPTED)
    command = [*POSEIDON, "run", "-n", "3", str(script), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(*(tmp_path / str(rank) for rank in range(3)))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    *lines, last = errors.splitlines()
    assert sorted(lines) == sorted(prefix + "whole" * 20 for prefix in ("", "[1] ", "[2] "))
    assert last == "poseidon: the run was interrupted by SIGINT; all ranks have ended"


@pytest.mark.parametrize("given", [["-n", "4"], ["-n4"], ["--workers=4"], ["--lr", "3", "--workers", "4"]])
def test_a_number_of_workers_after_the_script_is_refused(given: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, "print('trains alone')", "SCRIPT", *given)
    assert done.returncode == 1
    assert not done.stdout
    assert b"write poseidon run -n 4 " in done.stderr


def test_options_of_the_script_may_look_alike(tmp_path: Path) -> None:
    text = "import sys\nprint(sys.argv[1:])"
    assert run(tmp_path, text, "-n", "1", "SCRIPT", "-n", "4").stdout == b"['-n', '4']\n"
    assert run(tmp_path, text, "SCRIPT", "-n", "name").stdout == b"['-n', 'name']\n"


@pytest.mark.parametrize("taken", [False, True])
def test_without_a_home_it_runs(taken: bool) -> None:
    text = "from poseidon.chunk_cache import cache_folder\nprint(cache_folder())"
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    user = 4242 if os.geteuid() == 0 else os.getuid()
    command = ["setpriv", f"--reuid={user}", "--clear-groups"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o1777)
        usual = Path(name, f"poseidon-cache-{user}")
        if taken:  # by somebody who would like to have programs run
            usual.mkdir()
            usual.chmod(0o777)
        environment["TMPDIR"] = name
        done = subprocess.run([*command, sys.executable, "-c", text], env=environment, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.decode().strip())
        assert (folder == usual) != taken
        assert folder.stat().st_mode & 0o777 == 0o700
