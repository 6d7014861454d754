"""deploy/Containerfile: built as an image, which is run and serves a job.

Its base, `python:3.11-slim`, is a Debian with Python that is made here, so that no registry is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import debian
from places import PROJECT
from waiting import wait_until

BASE = "docker.io/library/python:3.11-slim"
IMAGE = "localhost/poseidon-server"
ASK = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:7070/readyz').status)"
# With what pip and apt reach packages on this machine.
SHARED = ("/etc/pip.conf", "/etc/ssl/certs")


def buildah(*arguments: str) -> str:
    return subprocess.run(["buildah", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def make_base() -> None:
    """The base image, unless it is there: Debian's Python, with the names of the image that stands in its place."""
    if buildah("images", "--quiet", "--filter", f"reference={BASE}"):
        return
    container = buildah("from", "scratch")
    root = Path(buildah("mount", container))
    debian.make_root(root, "python3,python3-pip,python3-dev,ca-certificates")
    (root / "usr/bin/python").symlink_to("python3")
    next(root.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
    buildah("umount", container)
    buildah("commit", "--quiet", "--rm", container, BASE)


@pytest.fixture(scope="module")
def image() -> str:
    if os.geteuid() != 0 or shutil.which("buildah") is None or shutil.which("debootstrap") is None:
        pytest.skip("building an image needs root, buildah and debootstrap")
    make_base()
    volumes = [text for path in SHARED if Path(path).exists() for text in ("-v", f"{path}:{path}:ro")]
    options = ["--isolation", "chroot", "--network", "host", "--pull-never", *volumes]
    subprocess.run(
        ["buildah", "bud", *options, "-f", "deploy/Containerfile", "-t", IMAGE, "."],
        cwd=PROJECT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return IMAGE


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Of the image's user, who alone may read it."""
    path = tmp_path / "secret"
    path.write_text("5" * 64 + "\n")
    path.chmod(0o400)
    os.chown(path, 1000, 1000)
    return path


@pytest.fixture
def server(image: str, secret: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The image's own command on a network of its own."""
    container = buildah("from", "--pull-never", image)
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    assert config["User"] == "poseidon"
    run = ["buildah", "run", "--isolation", "chroot", "-v", f"{secret}:/run/secrets/poseidon:ro"]
    run += [container, "--", *config["Entrypoint"], *config["Cmd"]]
    process = subprocess.Popen(["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "run", *run])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        buildah("rm", container)


def answer(server: subprocess.Popen[bytes]) -> str:
    ask = ["nsenter", "-t", str(server.pid), "-n", sys.executable, "-c", ASK]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip()


def test_the_image_serves_a_job(server: subprocess.Popen[bytes], secret: Path) -> None:
    wait_until(lambda: server.poll() is not None or answer(server) == "200", "the server's answer", every=0.2)
    assert server.poll() is None, "the server has ended"
    job = ["nsenter", "-t", str(server.pid), "-n", sys.executable, "-m", "poseidon", "run", "-n", "2"]
    script = [str(PROJECT / "examples/push_pull.py")]
    job += ["--servers", "127.0.0.1:7000", "--timeout", "20"]
    told = subprocess.run([*job, "--secret-file", str(secret), *script], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    stranger = subprocess.run([*job, *script], capture_output=True, text=True, timeout=60)
    assert stranger.returncode != 0
    assert "secret" in stranger.stderr
