"""The machine on which the service is tried: made once, it is kept in build/deploy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import debian
from places import FOLDER, PROJECT, ROOT, SECRET


@pytest.fixture(scope="session")
def machine() -> Iterator[debian.Machine]:
    """A Debian without a compiler, with Poseidon from a wheel, and its unit started as docs/server.md says."""
    if lacking := debian.missing():
        pytest.skip(f"a machine with systemd needs {lacking}")
    if not (ROOT / "etc/debian_version").exists():
        ROOT.mkdir(parents=True, exist_ok=True)
        debian.make_root(ROOT)
    _install()
    SECRET.parent.mkdir(exist_ok=True)
    SECRET.write_text("5" * 64 + "\n")
    SECRET.chmod(0o600)
    shutil.copy(PROJECT / "deploy/poseidon-server.service", ROOT / "etc/systemd/system")
    with debian.booted(ROOT) as booted:
        booted.run("systemctl start poseidon-server")
        yield booted


def _install() -> None:
    """Builds a wheel and installs it there. UCX is left out, as its library is on few machines."""
    wheels = FOLDER / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-build-isolation", "-C", "cmake.define.POSEIDON_UCX=OFF", "-C", f"build-dir={FOLDER}/build"]
    subprocess.run([*pip, *build, "-w", str(wheels), str(PROJECT)], check=True)
    inside = ROOT / "wheels"
    shutil.rmtree(inside, ignore_errors=True)
    shutil.copytree(wheels, inside)
    venv = "/usr/local/poseidon"
    install = f"{venv}/bin/pip install -q --force-reinstall --no-index --find-links /wheels poseidon-dl"
    link = f"ln -sf {venv}/bin/poseidon /usr/local/bin/poseidon"
    steps = f"python3 -m venv {venv} && {install} && {link}"
    subprocess.run(["chroot", str(ROOT), "bash", "-c", steps], check=True, stdout=subprocess.DEVNULL)
