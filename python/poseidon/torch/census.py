"""What training would exchange for each parameter of models: seen in steps of a script, for `poseidon plan`.

The parameters are those that training collects, and each is followed by the class that follows it in training. So the
plan has every parameter, whether its module's `forward` runs or its weight is used by other code.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import nn

from poseidon.options import resolve
from poseidon.torch.model.collect import collect_parameters
from poseidon.torch.model.factors import NO_FACTORS
from poseidon.torch.model.gradient_form import RowsForm
from poseidon.torch.model.parameters import SyncedParameter, attach_all
from poseidon.torch.model.passes import Mode

LEAST_STEPS = 3
_MOST_STEPS, _MOST_SECONDS = 40, 20.0  # where some parameters have a gradient in some steps only


class Census:
    """Follows the parameters of `models`, by their names, step by step."""

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
