"""The C++ library, installed: a program outside the tree finds it with CMake, and its workers exchange."""

import os
import re
import subprocess
import sys
from pathlib import Path

from poseidon.launch import free_port

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_program_outside_the_tree_uses_the_installed_library(tmp_path: Path) -> None:
    built = max(ROOT.glob("build/cp3*/"), key=lambda directory: directory.stat().st_mtime)
    prefix = tmp_path / "prefix"
    run("cmake", "--install", built, "--component", "cpp", "--prefix", prefix)
    installed = {path.name for path in prefix.rglob("*")}
    headers = {path.name for path in (ROOT / "include/poseidon").iterdir()}
    assert headers | {"libposeidon.a", "poseidon-config.cmake"} <= installed
    assert not any(re.match(r"_core.*\.so", name) for name in installed), "the extension belongs to the wheel"

    program = tmp_path / "program"
    run("cmake", "-S", ROOT / "examples/cpp", "-B", program, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", program)
    assert "Every worker has the mean" in run(program / "push_pull", str(free_port()))
    assert "could not spoil" in run(program / "aggregator", str(free_port()))
