"""The layer table of a user's own training script or model, measured in a few steps of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.launch import free_port
from poseidon.models import LayerSpec, ModelTable, ParameterSpec

_MEASURE = "poseidon.torch.measure_script"
_STANDARD_ERROR = 2


def measure_script(script: Path, arguments: Sequence[str]) -> ModelTable:
    """Runs the script as the only worker of its job until it has made a few steps of its optimizer, and ends it.

    What it prints goes to standard error. Raises InvalidArgument if it fails, ends before, or has no layers.
    """
    if not script.is_file():
        raise InvalidArgument(f"there is no script {script}: give the path of one")
    return _measure(str(script), script.name, [str(script), *arguments])


def measure_object(name: str) -> ModelTable:
    """The same of a model and a batch that are an object of Python, `module:object`."""
    return _measure(name, name, [str(files("poseidon.torch") / "measure_model.py"), name])


def _measure(called: str, title: str, program: Sequence[str]) -> ModelTable:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "layers.json"
        command = [sys.executable, "-m", _MEASURE, str(result), *program]
        code = subprocess.run(command, env=_alone(), stdout=_STANDARD_ERROR, check=False).returncode
        if not result.exists():
            raise InvalidArgument(
                f"{called} failed (exit code {code}): its own message is above"
                if code
                else f"{called} ended before its optimizer had made the steps that are measured: let it train longer"
            )
        document = json.loads(result.read_text(encoding="utf-8"))
    return table_of(title, document)


def table_of(name: str, measured: Mapping[str, Any]) -> ModelTable:
    """The table of what `poseidon.torch.measure_script` has written."""
    batch = max(1, round(measured["samples"]))
    layers = tuple(_layer(layer, batch) for layer in measured["layers"])
    if not any(layer.parameters for layer in layers) or not any(sum(one["seconds"]) for one in measured["layers"]):
        raise InvalidArgument(
            f"{name} has no module whose parameters are trained, or runs them where they cannot be seen: a model that "
            "is compiled (torch.compile) has to be measured without that"
        )
    seconds = tuple(
        (float(forward), float(backward)) for forward, backward in (one["seconds"] for one in measured["layers"])
    )
    forward, backward = (sum(one[part] for one in seconds) for part in (0, 1))
    return ModelTable(
        name,
        layers,
        batch,
        measured["step_s"],
        f"{name} on this machine, the median of a few steps",
        sample="sample",
        forward_share=forward / (forward + backward),
        seconds=seconds,
    )


def _layer(measured: Mapping[str, Any], batch: int) -> LayerSpec:
    shape = tuple(measured["shape"])
    positions = max(1, round(measured["positions"] / batch))
    times = positions if measured["kind"] in ("fc", "conv") else 1
    return LayerSpec(
        measured["name"],
        measured["kind"],
        shape,
        measured["bias"],
        2.0 * math.prod(shape) * times,
        positions,
        shares=measured["shares"],
        parameters=tuple(ParameterSpec(**{**one, "shape": tuple(one["shape"])}) for one in measured["parameters"]),
    )


def _alone() -> dict[str, str]:
    """The environment of the only worker of a job, as launchers set it."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
