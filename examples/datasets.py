"""The pictures on which the examples train.

Fashion-MNIST comes from Debian's package `dataset-fashion-mnist`: as installed, from `data/`, or unpacked into `data/`
without root. If the package is not available, scikit-learn's digits are used; `Dataset.name` says which it is.

    python examples/datasets.py        # fetch Fashion-MNIST into data/ ahead of time
"""

from __future__ import annotations

import fcntl
import gzip
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PACKAGE = "dataset-fashion-mnist"
INSTALLED = Path("/usr/share/datasets/fashion-mnist")
DATA = Path(__file__).resolve().parent.parent / "data"
UNPACKED = DATA / "fashion-mnist"
APT_TIMEOUT_S = 120


@dataclass
class Dataset:
    """Normalized float32 pictures, N×C×H×W, and int64 labels 0…9."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(name: str = "auto") -> Dataset:
    """Loads 1×28×28 pictures: "fashion-mnist", "digits", or "auto" for the first of these that can be had."""
    if name not in ("auto", "fashion-mnist", "digits"):
        raise ValueError(f"unknown dataset {name!r}: take auto, fashion-mnist or digits")
    if name != "digits":
        folder = fetch_fashion_mnist()
        if folder is not None:
            return _fashion_mnist(folder)
        if name == "fashion-mnist":
            raise FileNotFoundError(f"Fashion-MNIST is not here: install Debian's package {PACKAGE}")
    return _digits()


def load_32x32(folder: str | None = None, name: str = "auto") -> Dataset:
    """Loads 3×32×32 pictures: CIFAR-10 from its binary batches in `folder`, else `load(name)` resized."""
    if folder is not None:
        return _cifar10(Path(folder))
    small = load(name)
    return Dataset(
        f"{small.name}, resized to 32×32×3 (no folder with CIFAR-10 given)",
        _resized(small.train_images, 32, channels=3),
        small.train_labels,
        _resized(small.test_images, 32, channels=3),
        small.test_labels,
    )


def fetch_fashion_mnist() -> Path | None:
    """The folder that holds Fashion-MNIST, downloaded if need be; None where it cannot be had."""
    for folder in (INSTALLED, UNPACKED):
        if _complete(folder):
            return folder
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return None
    DATA.mkdir(exist_ok=True)
    with open(DATA / ".lock", "w") as lock:  # several workers start at once; one of them downloads
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete(UNPACKED):
            _download()
    return UNPACKED if _complete(UNPACKED) else None


def _complete(folder: Path) -> bool:
    return all((folder / f"{part}-ubyte.gz").is_file() for part in _PARTS)


_PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def _download() -> None:
    """Unpacks Debian's package into data/. Leaves nothing there if that fails."""
    with tempfile.TemporaryDirectory(dir=DATA) as scratch:
        # Package lists of our own: a fresh machine's may be empty, and only root may refresh those.
        lists = ["-o", f"Dir::State::Lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache"]
        Path(scratch, "lists", "partial").mkdir(parents=True)
        Path(scratch, "cache", "archives", "partial").mkdir(parents=True)
        if not _run(["apt-get", "download", PACKAGE], scratch) and not (
            _run(["apt-get", *lists, "update"], scratch) and _run(["apt-get", *lists, "download", PACKAGE], scratch)
        ):
            return
        archives = list(Path(scratch).glob(f"{PACKAGE}_*.deb"))
        if archives and _run(["dpkg", "-x", str(archives[0]), "unpacked"], scratch):
            unpacked = Path(scratch, "unpacked", *INSTALLED.parts[1:])
            if _complete(unpacked):
                shutil.rmtree(UNPACKED, ignore_errors=True)
                unpacked.rename(UNPACKED)


def _run(command: list[str], folder: str) -> bool:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=APT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _fashion_mnist(folder: Path) -> Dataset:
    train, train_labels, test, test_labels = (_read_idx(folder / f"{part}-ubyte.gz") for part in _PARTS)
    return _normalized("Fashion-MNIST", train[:, None], train_labels, test[:, None], test_labels)


def _read_idx(path: Path) -> np.ndarray:
    """Reads one file of unsigned bytes in MNIST's format: a magic word, the dimensions, the data."""
    with gzip.open(path, "rb") as file:
        content = file.read()
    dimension_count = content[3]
    header_bytes = 4 + 4 * dimension_count
    shape = np.frombuffer(content[4:header_bytes], dtype=">u4").astype(int)
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)


def _digits() -> Dataset:
    # Not by load_digits(), which takes half as long to import as PyTorch, in each worker.
    installed = find_spec("sklearn")
    if installed is None or installed.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    digits = np.loadtxt(Path(installed.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    pictures = torch.from_numpy(digits[:, :-1].reshape(-1, 1, 8, 8)).float()
    images = _resized(pictures * (255 / 16), 28, channels=1).numpy()
    labels = digits[:, -1]
    return _normalized(
        "digits (scikit-learn), resized to 28×28", images[:1500], labels[:1500], images[1500:], labels[1500:]
    )


def _cifar10(folder: Path) -> Dataset:
    train = sorted(folder.glob("data_batch_*.bin"))
    test = folder / "test_batch.bin"
    if not train or not test.is_file():
        raise FileNotFoundError(
            f"{folder} has no data_batch_1.bin … and test_batch.bin: give the folder of CIFAR-10's binary version"
        )
    images, labels = zip(*(_read_cifar10(path) for path in train), strict=True)
    return _normalized("CIFAR-10", np.concatenate(images), np.concatenate(labels), *_read_cifar10(test))


def _read_cifar10(path: Path) -> tuple[np.ndarray, np.ndarray]:
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _resized(images: Tensor, size: int, channels: int) -> Tensor:
    larger = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return larger.expand(-1, channels, -1, -1).contiguous()


def _normalized(
    name: str, train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
) -> Dataset:
    """Scales both sets by the training set's mean and deviation."""
    train_images = torch.from_numpy(train.astype(np.float32))
    deviation, mean = torch.std_mean(train_images)
    return Dataset(
        name,
        train_images.sub_(mean).div_(deviation),
        torch.from_numpy(train_labels.astype(np.int64)),
        torch.from_numpy(test.astype(np.float32)).sub_(mean).div_(deviation),
        torch.from_numpy(test_labels.astype(np.int64)),
    )


if __name__ == "__main__":
    found = fetch_fashion_mnist()
    print(f"Fashion-MNIST is in {found}" if found else "Fashion-MNIST cannot be had; the examples use digits")
