"""Runs a training script for a few steps, and writes what its layers are and what they take, for `poseidon plan`.

    python -m poseidon.torch.measure_script RESULT.json train.py [ARGUMENTS]

The script is unchanged, and runs as the only worker of its job. It is ended after some steps of its optimizer. The
first are not counted. The next are timed as they are. Then some are watched layer by layer, which slows them. In the
last ones the parameters are followed as training does.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from poseidon.options import resolve
from poseidon.torch.model.collect import collect_parameters
from poseidon.torch.model.factors import NO_FACTORS
from poseidon.torch.model.gradient_form import RowsForm
from poseidon.torch.model.parameters import SyncedParameter, attach_all
from poseidon.torch.model.passes import Mode
from poseidon.torch.tensors.devices import runtimes_in_use

LEAST_STEPS = 3
_MOST_STEPS, _MOST_SECONDS = 40, 20.0  # where some parameters have a gradient in some steps only


class Census:
    """Follows the parameters of `models`, by their names, step by step.

    The parameters are those that training collects, and each is followed by the class that follows it in training. So
    the plan has every parameter, whether its module's `forward` runs or its weight is used by other code.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        settings = resolve().replace(
            scheme="auto", wire="fp32", lossy="", small_bytes=0, stragglers="wait", consistency="bsp"
        )  # what it could be
        self._names: dict[SyncedParameter, str] = {}
        known: set[nn.Parameter] = set()
        for prefix, model in models.items():
            ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            for entry in collect_parameters(model, None, None, settings, ignored):
                if entry.param not in known:
                    known.add(entry.param)
                    self._names[entry] = prefix + entry.name
        self._rows: dict[SyncedParameter, int] = {}  # of the step so far: the rows of each gradient
        self._seen: dict[SyncedParameter, list[int | None]] = {entry: [] for entry in self._names}  # K, step by step
        self.steps = 0  # that were seen
        self._began = time.monotonic()
        attach_all(list(self._names), self)
        for entry in self._names:
            entry.hear_before()
            entry.capture(entry.terms.uses_factors)

    @property
    def entries(self) -> list[SyncedParameter]:
        """The parameters, in the order of registration."""
        return list(self._names)

    # As `BackwardListener`.

    @property
    def mode(self) -> Mode:
        """All gradients are exchanged."""
        return Mode.EXCHANGED

    def before_factors(self) -> None:
        """They are added to the gradient when it is complete."""

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        """A gradient that is partly dense has no factors."""
        if dense:
            entry.note_dense_contribution()

    def after_accumulation(self, entry: SyncedParameter) -> None:
        """Makes `.grad` what it is without factors."""
        if entry.factors:
            with torch.no_grad():
                if entry.param.grad is None:
                    entry.param.grad = torch.zeros_like(entry.param)
                entry.factors.add_to(entry.param.grad)
            entry.factors = NO_FACTORS
        self._rows[entry] = _row_count(entry)

    def step_ended(self) -> bool:
        """The optimizer has made a step. Returns whether enough is known."""
        self.steps += 1
        for entry, seen in self._seen.items():
            if entry not in self._rows:
                seen.append(None)
            elif isinstance(entry.form, RowsForm):
                seen.append(self._rows[entry])
            else:
                seen.append(entry.known_factor_count(entry.param) or 0)
            entry.start_over()
        self._rows.clear()
        if self.steps < LEAST_STEPS:
            return False
        settled = all(seen.count(None) in (0, len(seen)) for seen in self._seen.values())
        return settled or self.steps >= _MOST_STEPS or time.monotonic() - self._began > _MOST_SECONDS

    def found(self, entry: SyncedParameter, place: int) -> dict[str, Any]:
        """What a plan has to know of it, as plain data."""
        seen = self._seen[entry]
        present = [count for count in seen if count is not None]
        # After a step without a gradient nothing is known of its factors: it goes whole.
        returns = sum(before is None and now is not None for before, now in pairwise(seen))
        follows = sum(before is not None and now is not None for before, now in pairwise(seen))
        knows = present and returns <= follows and not (len(present) < len(seen) and not returns + follows)
        form = entry.form
        return {
            "name": self._names[entry],
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "count": entry.element_count,
            "size_bytes": entry.element_count * entry.layout.element_size(),
            "factorable": entry.factorable,
            "fully_connected": entry.fully_connected,
            "rows": "" if not isinstance(form, RowsForm) else "sparse" if form.is_sparse else "touched",
            "factor_count": round(fmean(present)) if knows else 0,
            "presence": len(present) / max(1, len(seen)),
            "place": place,
        }


def _row_count(entry: SyncedParameter) -> int:
    """The rows of the gradient."""
    form, grad = entry.form, entry.param.grad
    if not isinstance(form, RowsForm) or grad is None:
        return 0
    found = form.rows_of(grad)
    return entry.shape[0] if found is None else len(found[0])


WARM_UP, TIMED, WATCHED = 2, 5, 2
_COUNTED_FROM = WARM_UP + TIMED + WATCHED


@dataclass
class Watched:
    """A module with parameters of its own. Times are those of all watched steps together."""

    module: nn.Module
    forward_s: float = 0.0
    backward_s: float = 0.0
    positions: int = 0  # how often its weight is applied


class ScriptMeter:
    """Counts the steps of the first optimizer that steps, times them, and watches the last ones."""

    def __init__(self, result: Path) -> None:
        self._result = result
        self._optimizer: torch.optim.Optimizer | None = None
        self._ended: list[float] = []  # when each step ended
        self._modules: dict[int, Watched] = {}  # by identity, in the order of their first use
        self._samples = 0
        self._hooked: dict[nn.Parameter, Any] = {}  # the hook of each parameter
        self._roots: list[nn.Module] = []  # the models that have run, in the order of their first run
        self._depth = 0
        self._census: Census | None = None
        self._trained: set[nn.Parameter] = set()  # by optimizers
        self._hooks: list[Any] = []
        self._since = 0.0
        self._running: Watched | None = None
        self._counts_samples = False
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        self._trained.update(one for group in optimizer.param_groups for one in group["params"])
        if optimizer is not self._optimizer:
            return
        if self._census is not None:
            if self._census.step_ended():
                self._finish()
            return
        _synchronize()
        self._ended.append(time.perf_counter())
        if len(self._ended) == WARM_UP + TIMED:
            self._hooks += [hooks.register_module_forward_pre_hook(self._before)]
            self._hooks += [hooks.register_module_forward_hook(self._after)]
        if len(self._ended) == _COUNTED_FROM:
            self._count()

    def _count(self) -> None:
        """All is timed: from now on the parameters are followed."""
        for hook in (*self._hooks, *self._hooked.values()):
            hook.remove()
        self._census = Census(_models(self._roots, self._trained))
        atexit.register(self._finish_early)

    def _finish_early(self) -> None:
        """The script ends before enough is known of parameters that some steps do not reach."""
        if self._census is not None and self._census.steps >= LEAST_STEPS:
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
            self._samples += len(inputs[0])
            self._counts_samples = False

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if _in_backward():
            return
        self._depth -= 1
        watched = self._modules.get(id(module))
        if watched is not None and inputs and isinstance(inputs[0], torch.Tensor) and isinstance(output, torch.Tensor):
            _count(watched, inputs[0], output)
        if self._depth == 0:
            self._switch_to(None)

    def _enter(self, module: nn.Module) -> None:
        """A model begins its forward pass."""
        self._counts_samples = True
        self._since = _now()
        self._running = None
        if not any(module is root for root in self._roots):
            self._roots.append(module)

    def _watch(self, module: nn.Module) -> Watched:
        known = self._modules.get(id(module))
        if known is None:
            known = self._modules[id(module)] = Watched(module)
            for _, parameter in _own_parameters(module):
                if parameter not in self._hooked:
                    self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(
                        lambda _: self._has_gradient(known)
                    )
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
        assert self._census is not None
        times = self._ended[WARM_UP : WARM_UP + TIMED]
        before = self._ended[WARM_UP - 1 : WARM_UP + TIMED - 1]
        document = {
            "step_s": median(end - begin for begin, end in zip(before, times, strict=True)),
            "samples": self._samples / WATCHED,
            "layers": list(_layers(self._modules, self._census, _models(self._roots, self._trained))),
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
        watched.positions += output.numel() // max(1, module.out_features)
    elif isinstance(module, nn.Embedding):
        watched.positions += given.numel()
    elif isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() > 0:
        watched.positions += output.numel() // max(1, len(weight))


def _models(roots: list[nn.Module], trained: set[nn.Parameter]) -> dict[str, nn.Module]:
    """The models that an optimizer trains, by the prefix of their parameters' names. Parts of others are none.

    Of a wrapper it is the module, by which training names parameters.
    """
    unknown = trained.difference(*(root.parameters() for root in roots))
    if unknown:  # of models that are used by their parts only
        everywhere = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]  # isinstance would ask it
        roots = [*roots, *(one for one in everywhere if not unknown.isdisjoint(one.parameters()))]
    parts = {id(part) for root in roots for part in root.modules() if part is not root}
    found = [root for root in roots if id(root) not in parts and not trained.isdisjoint(root.parameters())]
    inner = [root.module if isinstance(root, TorchDistributedDataParallel) else root for root in found]
    return {"" if number == 1 else f"{number}.": module for number, module in enumerate(inner, 1)}


def _layers(seen: dict[int, Watched], census: Census, models: dict[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Each module with parameters of its own, in forward order, those that did not run after the one before them."""
    places = {entry: place for place, entry in enumerate(census.entries)}
    owned: dict[int, list[SyncedParameter]] = {}
    by_parameter = {entry.param: entry for entry in places}
    modules: dict[int, tuple[str, nn.Module]] = {}
    for prefix, model in models.items():
        for name, module in model.named_modules():
            if _own_parameters(module):
                modules[id(module)] = (prefix + (name or type(module).__name__.lower()), module)
    order = _forward_order(list(modules), list(seen))
    shares: dict[nn.Parameter, str] = {}
    for key in order:
        name, module = modules[key]
        for _, parameter in _own_parameters(module):
            if parameter in by_parameter and parameter not in shares:
                shares[parameter] = name
                owned.setdefault(key, []).append(by_parameter[parameter])
    for key in order:
        name, module = modules[key]
        watched = seen.get(key) or Watched(module)
        own = dict(_own_parameters(module))
        weight = own.get("weight", next(iter(own.values())))
        shared = shares.get(weight, name)
        yield {
            "name": name,
            "kind": _kind_of(module) if "weight" in own else "plain",
            "shape": list(weight.shape) or [1],
            "bias": "bias" in own,
            "shares": shared if shared != name else "",
            "positions": watched.positions / WATCHED,
            "seconds": (watched.forward_s / WATCHED, watched.backward_s / WATCHED),
            "parameters": [census.found(entry, places[entry]) for entry in owned.get(key, ())],
        }


def _forward_order(registered: list[int], ran: list[int]) -> list[int]:
    """The modules in the order in which they ran. The others follow the one that was registered before them."""
    known = set(registered)
    order = [key for key in ran if key in known]
    for index, key in enumerate(registered):
        if key not in order:
            order.insert(order.index(registered[index - 1]) + 1 if index else 0, key)
    return order


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
    for runtime in runtimes_in_use():
        runtime.synchronize()


def main(arguments: list[str]) -> None:
    """Runs the script as `__main__`."""
    result, *program = arguments
    ScriptMeter(Path(result))
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
