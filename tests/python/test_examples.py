"""The examples run, alone and with two workers, and train with Poseidon as they do with plain DDP."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forked import run_script
from poseidon.launch import free_port
from workers import job_variables

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4
TIMEOUT_S = 150
SCRIPTS = {
    "mlp.py": ["--dataset", "digits", "--batch", "16"],
    "cifar10_quick.py": ["--dataset", "digits", "--batch", "16"],
    "vgg.py": ["--dataset", "digits", "--batch", "8"],
    "server_update.py": ["--dataset", "digits", "--batch", "16"],
    "transformer.py": ["--batch", "4", "--context", "16"],
}
AS_USERS_START_IT = "mlp.py"  # the others are forked, and so is plain DDP, which takes two minutes less
ALONE = (sys.executable,)
TWO = (sys.executable, "-m", "poseidon", "run", "-n", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FORKED = {ALONE: 1, TWO: 2}  # how many processes; whoever wants another start gets an error, not fewer of them


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def output_of(command: list[str]) -> str:
    """What a command prints; AssertionError with that if it fails."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def output_of_forked(world_size: int, command: list[str]) -> str:
    """What rank 0 prints when that many processes, or one alone, run a script; AssertionError if one fails."""
    port = free_port()
    ranks = [job_variables(rank, world_size, port) for rank in range(world_size)] if world_size > 1 else [{}]
    with tempfile.TemporaryDirectory() as folder:
        return run_script(command, [{**environment(), **rank} for rank in ranks], Path(folder), TIMEOUT_S)[0]


def patiently(ddp: bool, output: Callable[[], str]) -> str:
    """Gloo, which only gives the losses to compare with, sometimes aborts when a process ends: it gets three tries."""
    for _ in range(2 if ddp else 0):
        with contextlib.suppress(AssertionError):
            return output()
    return output()


@cache
def losses(start: tuple[str, ...], script: str, *more: str) -> list[float]:
    """The losses that rank 0 prints for `STEPS` steps."""
    command = [str(EXAMPLES / script), *SCRIPTS[script], "--steps", str(STEPS), "--log-every", "1", *more]
    if script == AS_USERS_START_IT and "--ddp" not in more:
        output = output_of([*start, *command])
    else:
        output = patiently("--ddp" in more, lambda: output_of_forked(FORKED[start], command))
    assert re.search(r"accuracy 0\.\d+", output)
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("start", [ALONE, TWO], ids=["alone", "two workers"])
def test_trains_as_plain_ddp_does(script: str, start: tuple[str, ...]) -> None:
    ours = losses(start, script)
    theirs = losses(start, script, "--ddp")
    assert len(ours) == STEPS
    assert len(set(ours)) > 1
    assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6)


def test_two_workers_differ_from_one() -> None:
    assert losses(TWO, "mlp.py") != pytest.approx(losses(ALONE, "mlp.py"), rel=1e-4)


def test_runs_under_torchrun() -> None:
    assert losses(TORCHRUN, "mlp.py") == pytest.approx(losses(TWO, "mlp.py"), rel=1e-5)


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Events of one thread lie inside or after one another, or Perfetto drops them."""
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        ends = open_until.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + 1e-3:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
        ends.append(event["ts"] + event["dur"])


slow = pytest.mark.skipif("SLOW_EXAMPLES" not in os.environ, reason="takes long: SLOW_EXAMPLES=1")


@pytest.mark.parametrize("method", ["poseidon", pytest.param("ddp", marks=slow)])
def test_demo_leaves_a_report_and_a_trace(method: str, tmp_path: Path) -> None:
    options = ["--dataset", "digits", "--epochs", "1", "--workers", "2", "--output", str(tmp_path)]
    command = [sys.executable, str(EXAMPLES / "demo.py"), *options, *(["--ddp"] if method == "ddp" else [])]
    output = patiently(method == "ddp", lambda: output_of(command))
    assert re.search(r"2 workers on (loopback|200mbit ports)", output)
    assert re.search(r"epoch 1 +loss \d\.\d+ +accuracy 0\.\d+ +[\d,]+ images/s", output)
    assert "Test accuracy: " in output
    page = (tmp_path / "report.html").read_text()
    assert "digits" in page
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward", "backward", "update"} <= {event.get("cat") for event in events}
    assert "Time of a step: " in output
    assert ("times as long" in output) == (method == "poseidon"), "beside that of plain DDP"
    if method == "poseidon":
        assert re.search(r"with plain DDP \(Gloo\), \S+ times as long", page)
        rows = {
            columns[0]: columns
            for line in output.splitlines()
            if len(columns := re.split(r"[│\s]+", line.strip("│ "))) > 4
        }
        assert rows["fc1.weight"][1:4] == ["sfb", "512×576", "32"]
        assert rows["conv2.weight"][1] == "ps"
        assert "fc1.weight (sfb)" in {event["args"].get("name") for event in events}


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch):
    """The module of the examples that loads pictures."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import datasets

    return datasets


def test_digits_stand_in_for_fashion_mnist(datasets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "fetch_fashion_mnist", lambda: None)
    data = datasets.load()
    assert data.name.startswith("digits")
    assert data.train_images.shape == (1500, 1, 28, 28)
    assert data.test_images.shape == (297, 1, 28, 28)
    assert float(data.train_images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(data.train_images.std()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        datasets.load("fashion-mnist")
    with pytest.raises(ValueError, match="unknown dataset"):
        datasets.load("imagenet")


def test_fashion_mnist_is_read_from_its_files(datasets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 10
    for part in ("train", "t10k"):
        with gzip.open(tmp_path / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes([0, 0, 8, 3]) + np.array(pictures.shape, ">u4").tobytes() + pictures.tobytes())
        with gzip.open(tmp_path / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes([0, 0, 8, 1]) + np.array(labels.shape, ">u4").tobytes() + labels.tobytes())
    monkeypatch.setattr(datasets, "INSTALLED", tmp_path)
    data = datasets.load()
    assert data.name == "Fashion-MNIST"
    assert data.test_labels.tolist() == labels.tolist()
    pixels = data.train_images[:, 0].numpy() * pictures.std(ddof=1) + pictures.mean()
    assert pixels == pytest.approx(pictures.astype(float), abs=0.01)
    larger = datasets.load_32x32()
    assert larger.train_images.shape == (20, 3, 32, 32)
    assert "resized" in larger.name


def test_cifar10_is_read_from_its_binary_batches(datasets, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        records = rng.integers(0, 256, (5, 3073), dtype=np.uint8)
        records[:, 0] = range(5)
        records.tofile(tmp_path / name)
    data = datasets.load_32x32(str(tmp_path))
    assert data.name == "CIFAR-10"
    assert data.train_images.shape == (10, 3, 32, 32)
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4] * 2
    pixels = records[:, 1:].reshape(5, 3, 32, 32)
    order = np.argsort(data.test_images.numpy().ravel(), kind="stable")
    assert (np.diff(pixels.ravel()[order].astype(int)) >= 0).all()
    with pytest.raises(FileNotFoundError, match="data_batch_1"):
        datasets.load_32x32(str(tmp_path / "nowhere"))


def test_the_script_of_the_readme_runs_and_leaves_no_warning(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code.replace("range(100)", "range(2)"), encoding="utf-8")
    command = [*TWO, str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1\.weight +2048×784 ", done.stdout, re.MULTILINE), done.stdout
    assert done.stderr == ""
