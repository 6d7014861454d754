"""The machine on which the service is tried: made once, it is kept in build/deploy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import debian

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def machine() -> Iterator[debian.Machine]:
    """A Debian without a compiler, with Poseidon from a wheel, and its unit started as docs/server.md says."""
    if lacking := debian.missing():
        pytest.skip(f"a machine with systemd needs {lacking}")
    folder = PROJECT / "build" / "deploy"
    root = folder / "root"
    if not (root / "etc/debian_version").exists():
        root.mkdir(parents=True, exist_ok=True)
        debian.make_root(root)
    _install(folder, root)
    (root / "etc/poseidon").mkdir(exist_ok=True)
    secret = root / "etc/poseidon/secret"
    secret.write_text("5" * 64 + "\n")
    secret.chmod(0o600)
    shutil.copy(PROJECT / "deploy/poseidon-server.service", root / "etc/systemd/system")
    with debian.booted(root) as booted:
        booted.run("systemctl start poseidon-server")
        yield booted


def _install(folder: Path, root: Path) -> None:
    """Builds a wheel and installs it there. UCX is left out, as its library is on few machines."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-build-isolation", "-C", "cmake.define.POSEIDON_UCX=OFF", "-C", f"build-dir={folder}/build"]
    subprocess.run([*pip, *build, "-w", str(wheels), str(PROJECT)], check=True)
    inside = root / "wheels"
    shutil.rmtree(inside, ignore_errors=True)
    shutil.copytree(wheels, inside)
    venv = "/usr/local/poseidon"
    install = f"{venv}/bin/pip install -q --force-reinstall --no-index --find-links /wheels poseidon-dl"
    link = f"ln -sf {venv}/bin/poseidon /usr/local/bin/poseidon"
    steps = f"python3 -m venv {venv} && {install} && {link}"
    subprocess.run(["chroot", str(root), "bash", "-c", steps], check=True, stdout=subprocess.DEVNULL)
