"""The notebook in examples/notebook runs, and its four workers learn and agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from runs import skip_without

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "four_workers.ipynb"
TIMEOUT_S = 300


def test_the_notebook_runs(tmp_path: Path) -> None:
    skip_without("nbclient", "ipykernel", "matplotlib", "sklearn")
    from nbclient import NotebookClient
    from nbformat import read

    shutil.copy(NOTEBOOK, tmp_path)
    notebook = read(tmp_path / NOTEBOOK.name, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["losses"][-1] < 0.2 < result["losses"][0]
    assert result["accuracy"] > 0.9
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "True"
