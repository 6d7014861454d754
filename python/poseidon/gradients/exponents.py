"""The sample of real gradients' exponents that comes with the package. `bench/gradients/sample.py` makes it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE = Path(__file__).with_name("sample.npz")
LIKE = {"lora": "gpt", "vit": "gpt", "resnet": "vit", "cnn": "resnet", "dlrm": "cnn", "gpt": "cnn"}
"""Of which family a kind is taken that a family's own sample does not have."""


@cache
def _file() -> dict[str, NDArray[np.uint8]]:
    with np.load(SAMPLE) as file:
        return {key: file[key] for key in file.files}


@cache
def index() -> dict[str, Any]:
    """What was sampled: `workers`, `steps`, and the measured `bits` a value, by "family/kind/step"."""
    text: dict[str, Any] = json.loads(_file()["index"].tobytes())
    return text


def keys() -> list[str]:
    """All that have exponents, as "family/kind/step"."""
    return [key for key in _file() if key != "index"]


def exponents(family: str, kind: str, step: int) -> NDArray[np.uint8]:
    """The biased exponents of fp32: workers × stretches × values, or workers × pieces × rows × columns of a factor.

    A kind that the family does not have is taken from the family most like it. KeyError if no family has it.
    """
    tried: list[str] = []
    while family not in tried:
        found = _file().get(f"{family}/{kind}/{step}")
        if found is not None:
            return found
        tried.append(family)
        family = LIKE[family]
    raise KeyError(f"the sample has no {kind} at step {step} in any of {', '.join(tried)}")
