"""What `poseidon run` does with output that it cannot read or write, and with failures and mistakes of its users."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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


FAILING = """
import os
import torch
import poseidon.torch as poseidon
torch.set_num_threads(1)
poseidon.init(flight_record="off")
poseidon.barrier()
if os.environ["RANK"] == "1":
    raise ValueError("the data of rank one is broken")
poseidon.barrier()
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
