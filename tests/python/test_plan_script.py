"""`poseidon plan train.py`: what is learnt from a script, and what is said of one that cannot be measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core")
pytest.importorskip("torch")

from poseidon.cli.measured_script import measure_object, measure_script
from poseidon.errors import InvalidArgument
from poseidon.torch.measure_model import train

SCRIPT = """
import sys, torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.body = nn.Sequential(nn.Conv1d(16, 8, 3, padding=1), nn.BatchNorm1d(8))
        self.frozen = nn.Linear(8, 16).requires_grad_(False)
        self.wide = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, words):
        hidden = self.body(self.table(words).transpose(1, 2)).transpose(1, 2)
        return self.head(self.wide(self.frozen(hidden)) * self.scale)

micro_batches, steps = map(int, sys.argv[1:])
network = Network()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(steps):
    optimizer.zero_grad()
    for _ in range(micro_batches):
        words = torch.randint(0, 100, (4, 6))
        torch.utils.checkpoint.checkpoint(network, words, use_reentrant=False).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_layers_batch_and_times_of_a_script(script: Path, micro_batches: int) -> None:
    table = measure_script(script, [str(micro_batches), "1000"])
    assert table.batch == 4 * micro_batches, "a checkpointed forward pass that runs again counts once"
    assert 0 < table.iteration_seconds < 60
    assert 0 < table.forward_share < 1
    layers = {layer.name: layer for layer in table.layers}
    assert set(layers) == {"network", "table", "body.0", "body.1", "wide", "head"}
    assert [one.name for one in layers["network"].parameters or ()] == ["scale"]
    assert (layers["wide"].kind, layers["wide"].weight_shape, layers["wide"].bias) == ("fc", (16, 16), True)
    assert [one.factor_count for one in layers["wide"].parameters or ()] == [4 * micro_batches * 6, 0]
    assert layers["head"].shares == "table"
    assert layers["body.0"].weight_shape == (8, 16, 3)
    assert layers["body.0"].positions == layers["table"].positions == 6
    assert len(table.seconds) == len(table.layers)
    assert sum(map(sum, table.durations(2.0))) == pytest.approx(2.0)


def test_what_cannot_be_measured_is_told(script: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="ended before its optimizer had made the steps"):
        measure_script(script, ["1", "3"])
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    with pytest.raises(InvalidArgument, match=r"bad.py failed \(exit code 3\)"):
        measure_script(tmp_path / "bad.py", [])
    with pytest.raises(InvalidArgument, match="there is no script"):
        measure_script(tmp_path / "none.py", [])


COMPILED = """
import torch
from torch import nn
model = torch.compile(nn.Linear(8, 8), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_compiled_model_is_told_to_be_measured_without_that(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    with pytest.raises(InvalidArgument, match=r"a model that is compiled .* has to be measured without that"):
        measure_script(tmp_path / "compiled.py", [])


MODEL = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
bare = model, None
no_gradient = nn.Linear(4, 4).requires_grad_(False), torch.zeros(3, 4)

def with_batch():
    return model, torch.zeros(24, 32)
"""


def test_a_model_and_a_batch_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    table = measure_object("own_model:with_batch")
    assert [(layer.name, layer.kind, layer.weight_shape) for layer in table.layers] == [
        ("0", "fc", (16, 32)),
        ("2", "fc", (4, 16)),
    ]
    assert table.batch == 24
    assert table.name == "own_model:with_batch"
    assert 0 < table.iteration_seconds < 60


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_model:nothing", "the module own_model has no 'nothing'"),
        ("no_such_module:model", "cannot be imported: No module named 'no_such_module'"),
        ("own_model:model", "is no model with a batch: give a tuple"),
        ("own_model:bare", "is no model with a batch: give a tuple"),
        ("own_model:no_gradient", "has no parameter that is trained"),
    ],
)
def test_what_is_no_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    (tmp_path / "own_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    with pytest.raises(InvalidArgument, match=words):
        train(name)
