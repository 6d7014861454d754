"""Runs a training script for a few steps, and writes what its layers are and what they take, for `poseidon plan`.

    python -m poseidon.torch.measure_script RESULT.json train.py [ARGUMENTS]

The script is unchanged, and runs as the only worker of its job. It is ended after `STEPS` steps of its optimizer. The
first are not counted. The next are timed as they are. The last are watched layer by layer, which slows them.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UP, TIMED, WATCHED = 2, 5, 2
STEPS = WARM_UP + TIMED + WATCHED


@dataclass
class Watched:
    """A module with parameters of its own. Times are those of all watched steps together."""

    name: str
    module: nn.Module
    forward_s: float = 0.0
    backward_s: float = 0.0
    rows: int = 0  # of its input, each a vector; of an embedding, the rows that it looks up
    positions: int = 0  # how often its weight is applied


@dataclass
class Pass:
    """What the watched steps have done."""

    modules: dict[int, Watched] = field(default_factory=dict)  # by identity, in the order of their first use
    samples: int = 0
    names: dict[int, str] = field(default_factory=dict)  # of all modules of the models that have run


class ScriptMeter:
    """Counts the steps of the first optimizer that steps, times them, and watches the last ones."""

    def __init__(self, result: Path) -> None:
        self._result = result
        self._optimizer: torch.optim.Optimizer | None = None
        self._ended: list[float] = []  # when each step ended
        self._seen = Pass()
        self._depth = 0
        self._models = 0  # that have run
        self._since = 0.0
        self._running: Watched | None = None
        self._counts_samples = False
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        _synchronize()
        self._ended.append(time.perf_counter())
        if len(self._ended) == WARM_UP + TIMED:
            hooks.register_module_forward_pre_hook(self._before)
            hooks.register_module_forward_hook(self._after)
        if len(self._ended) == STEPS:
            self._finish()

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if _in_backward():
            return
        if self._depth == 0:
            self._enter(module)
        self._depth += 1
        if not _own_parameters(module):
            return
        self._switch_to(self._watch(module))
        if self._counts_samples and inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim() > 0:
            self._seen.samples += len(inputs[0])
            self._counts_samples = False

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if _in_backward():
            return
        self._depth -= 1
        watched = self._seen.modules.get(id(module))
        if watched is not None and inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            _count(watched, inputs[0], output)
        if self._depth == 0:
            self._switch_to(None)

    def _enter(self, module: nn.Module) -> None:
        """A model begins its forward pass."""
        self._counts_samples = True
        self._since = _now()
        self._running = None
        if id(module) not in self._seen.names:
            self._models += 1
            prefix = "" if self._models == 1 else f"{self._models}."
            self._seen.names |= {id(one): prefix + name for name, one in module.named_modules()}

    def _watch(self, module: nn.Module) -> Watched:
        known = self._seen.modules.get(id(module))
        if known is None:
            name = self._seen.names.get(id(module)) or type(module).__name__.lower()
            known = self._seen.modules[id(module)] = Watched(name, module)
            for _, parameter in _own_parameters(module):
                if not hasattr(parameter, "_poseidon_watched"):
                    parameter.register_post_accumulate_grad_hook(lambda _: self._has_gradient(known))
                    parameter._poseidon_watched = True  # type: ignore[attr-defined]
        return known

    def _switch_to(self, watched: Watched | None) -> None:
        """What has run since the last module with parameters began counts to that one."""
        now = _now()
        if self._running is not None:
            self._running.forward_s += now - self._since
        self._running, self._since = watched, now

    def _has_gradient(self, watched: Watched) -> None:
        now = _now()
        watched.backward_s += now - self._since
        self._since = now

    def _finish(self) -> None:
        """Writes the result and ends the process at once: the script knows nothing of an end."""
        assert self._optimizer is not None
        times = self._ended[WARM_UP : WARM_UP + TIMED]
        before = self._ended[WARM_UP - 1 : WARM_UP + TIMED - 1]
        document = {
            "step_s": median(end - begin for begin, end in zip(before, times, strict=True)),
            "samples": self._seen.samples / WATCHED,
            "layers": list(_layers(self._seen)),
        }
        self._result.write_text(json.dumps(document), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, one) for name, one in module._parameters.items() if one is not None and one.requires_grad]


def _count(watched: Watched, given: torch.Tensor, output: torch.Tensor) -> None:
    module = watched.module
    if isinstance(module, nn.Linear):
        watched.rows += given.numel() // max(1, module.in_features)
        watched.positions += output.numel() // max(1, module.out_features)
    elif isinstance(module, nn.Embedding):
        watched.rows += given.numel()
        watched.positions += given.numel()
    elif isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() > 0:
        watched.positions += output.numel() // max(1, len(weight))


def _layers(seen: Pass) -> Iterator[dict[str, Any]]:
    """Each layer in forward order, a module's parameters together where the planner knows its kind."""
    owners: dict[int, str] = {}
    for watched in seen.modules.values():
        own = dict(_own_parameters(watched.module))
        weight, kind = own.get("weight"), _kind_of(watched.module)
        rest = {name: one for name, one in own.items() if name not in ("weight", "bias") or weight is None}
        if kind == "plain" and weight is not None and weight.dim() > 0:
            rest = own
            weight = None
        times = (watched.forward_s / WATCHED, watched.backward_s / WATCHED)
        if weight is not None:
            yield {
                "name": watched.name,
                "kind": kind,
                "shape": list(weight.shape),
                "bias": "bias" in own,
                "shares": owners.get(id(weight), ""),
                "positions": watched.positions / WATCHED,
                "seconds": times,
            }
            owners.setdefault(id(weight), watched.name)
            times = (0.0, 0.0)
        for name, one in rest.items():
            if id(one) not in owners:
                owners[id(one)] = f"{watched.name}.{name}"
                shape = list(one.shape) or [1]
                yield {"name": owners[id(one)], "kind": "plain", "shape": shape, "bias": False, "shares": "",
                       "positions": 0, "seconds": times}  # fmt: skip
                times = (0.0, 0.0)


def _kind_of(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "fc"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        return "conv"
    weight = getattr(module, "weight", None)
    return "norm" if isinstance(weight, torch.Tensor) and weight.dim() == 1 else "plain"


def _in_backward() -> bool:
    """Whether a part of a model runs forward again, for its backward pass (torch.utils.checkpoint)."""
    return torch._C._current_graph_task_id() != -1


def _now() -> float:
    _synchronize()
    return time.perf_counter()


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Runs the script as `__main__`."""
    result, *program = arguments
    ScriptMeter(Path(result))
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
