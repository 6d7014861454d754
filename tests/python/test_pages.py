"""Every Python snippet of README.md and docs/ runs, in a job of one worker.

Programs run as they are. A fragment finds what its page takes for granted: a model, an optimizer, batches. Pages about
other frameworks have tests of their own, which need those frameworks.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poseidon
import poseidon.torch

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "frameworks.md": "tests/frameworks/test_frameworks_page.py",
    "jax.md": "tests/python/test_jax.py",
    "launchers.md": "tests/frameworks/test_launchers.py",
    "tensorflow.md": "tests/python/test_tensorflow.py",
    "torch-backend.md": "tests/python/test_torch_backend.py",
}
# Whose lines are alternatives of each other.
ALTERNATIVES = {"stragglers.md-0", "distributed-optimizer.md-1", "lossy.md-0", "wire-formats.md-0"}
# Whose text says that the model is not wrapped.
UNWRAPPED = {"local-sgd.md"}
STEPS = 3


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


SNIPPETS = {
    f"{page.name}-{number}": snippet
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.name not in ELSEWHERE
    for number, snippet in enumerate(snippets(page))
}


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")


def batch(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 20), torch.randn(4, 2)


class GPT(torch.nn.Sequential):
    """A model by any name."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("body", torch.nn.Linear(20, 8))
        self.add_module("head", torch.nn.Linear(8, 2))


def names(text: str, page: str) -> dict[str, Any]:
    """What a fragment takes for granted."""
    model: torch.nn.Module = GPT()
    if "init(" not in text:
        poseidon.torch.init()
        if "DistributedDataParallel(" not in text and page not in UNWRAPPED:
            model = poseidon.torch.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = batch()
    return {
        **{"torch": torch, "F": torch.nn.functional, "time": time, "poseidon": poseidon.torch, "GPT": GPT},
        **{"model": model, "optimizer": optimizer, "opt": optimizer, "inner": optimizer, "steps": STEPS},
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        **{"inputs": inputs, "targets": targets, "loader": [batch()] * STEPS, "batches": [batch()] * STEPS},
        "dataset": torch.utils.data.TensorDataset(torch.randn(50, 20), torch.randn(50, 2)),
        "epochs": 2,
        **{"batch": batch, "next_batch": lambda: inputs, "train": lambda *_: None, "log": []},
        **{"loss": lambda output: output.square().mean(), "loss_of": torch.nn.functional.mse_loss},
    }


@contextlib.contextmanager
def job_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a launcher describes it, with a free port for torch.distributed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    try:
        yield
    finally:
        poseidon.torch.shutdown()


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, text = name.rpartition("-")[0], SNIPPETS[name]
    if "tensorboard" in text:
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    text = re.sub(r'"/\w+/(\w+)"', rf'"{tmp_path}/\1"', text)
    text = text.replace("range(100)", f"range({STEPS})")
    torch.manual_seed(0)
    for part in text.splitlines() if name in ALTERNATIVES else [text]:
        with job_of_one(monkeypatch), contextlib.ExitStack() as stack:
            given = names(part, page)
            if "exchange." in part and "connect(" not in part:
                given["poseidon"] = poseidon
                given["exchange"] = stack.enter_context(poseidon.connect())
                given["exchange"].declare({"w": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
            exec(compile(part, name, "exec"), given)


def test_no_page_installs_from_an_index_that_has_no_poseidon() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
    assert not [page.name for page, text in texts.items() if re.search(r"pip install\S*\s+\"?poseidon", text)]


def test_the_sites_search_finds_options_by_a_part_of_their_name() -> None:
    (separator,) = re.findall(r"separator: '(.*?)'", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert re.split(separator, "priority_threshold") == ["priority", "threshold"]
    assert re.split(separator, "--chunk-bytes")[1:] == ["chunk", "bytes"]


def test_pages_that_promise_equal_bits_of_two_runs_name_the_switch() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if re.search(r"\b(repeatable|two runs (?:have|give))\b", text, re.IGNORECASE) and page.name != "reliability.md":
            assert re.search(r"revise|choice\.md#the-same-bits-again", text), page.name


def test_several_machines_quotes_the_error_of_a_rendezvous_that_is_not_there() -> None:
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(poseidon.PoseidonError) as raised:
            poseidon.connect(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port, timeout=1)
    text = str(raised.value).replace(f"127.0.0.1:{port}", "node0:29500")
    page = (ROOT / "docs" / "several-machines.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^- \*\*`([^`]+node0:29500)`", page, re.MULTILINE)
    assert len(quoted) == 1
    assert text.startswith(quoted[0])
    assert "flight record" not in text, "the page says so"
