"""Torch's `powerSGD_hook` by the scheme powersgd: which layers take it, and from which step on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from poseidon import _core
from poseidon.torch.model.parameters import SyncedParameter

SCHEME = "powersgd"
_LEAST_RATE = 2  # the scheme takes no matrix that becomes smaller by less


def is_powersgd(hook: Any) -> bool:
    """Whether it is torch's hook that compresses each matrix by itself."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return hook is powerSGD_hook.powerSGD_hook


def unlike_scheme(state: Any) -> str | None:
    """What of this state the scheme cannot do, and why; None if it can do all of a `PowerSGDState`.

    A state of another class is one of these: torch's hook takes it until the first backward pass, and fails there.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    if not isinstance(state, PowerSGDState):
        return f"the class {type(state).__name__}, and the scheme needs a PowerSGDState"
    if not state.use_error_feedback:
        return "use_error_feedback=False, and the scheme always keeps what it has not sent"
    if not state.warm_start:
        return "warm_start=False, and the scheme always begins with the vectors of the last step"
    if state.orthogonalization_epsilon:
        return f"orthogonalization_epsilon={state.orthogonalization_epsilon}, and the scheme adds nothing to lengths"
    if state.min_compression_rate < _LEAST_RATE:
        return f"min_compression_rate={state.min_compression_rate}, and the scheme takes {_LEAST_RATE} or more"
    if state.error_dict:
        return "residuals of torch's hook, which the scheme cannot take over"
    return None


def is_open(entry: SyncedParameter) -> bool:
    """Whether nobody has asked for a scheme of this parameter, so that a hook may."""
    return entry.asked.scheme == "auto" and not entry.asked.lossy


class PowerSGDHook:
    """What a `PowerSGDState` asks for. It counts the steps in `state.iter`, as torch's hook does."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._first_iter = state.iter
        self._layers: Sequence[SyncedParameter] = ()
        self._is_exact = False
        self._numbers = (0, 0)  # of a step, before and after compression

    @property
    def rank(self) -> int:
        """The rank of what a worker sends."""
        return int(self._state.matrix_approximation_rank)

    def describe(self) -> str:
        """What must be the same on all ranks."""
        state = self._state
        return (
            f"powerSGD_hook, rank {self.rank}, step {self._first_iter}, "
            f"start_powerSGD_iter {state.start_powerSGD_iter}, min_compression_rate {state.min_compression_rate}"
        )

    def choose_layers(self, entries: Sequence[SyncedParameter]) -> Sequence[SyncedParameter]:
        """Makes the parameters that the hook compresses, and whose scheme is open, take the scheme. Returns them."""
        self._layers = [entry for entry in entries if self._compresses(entry)]
        for entry in self._layers:
            entry.compress_by(SCHEME, self.rank)
        before = sum(entry.element_count for entry in entries)
        saved = sum(entry.element_count - self._compressed_count(entry) for entry in self._layers)
        self._numbers = (before, before - saved)
        return self._layers

    def _compressed_count(self, entry: SyncedParameter) -> int:
        rows = entry.asked.matrix_rows
        return (rows + entry.element_count // rows) * self.rank

    def _compresses(self, entry: SyncedParameter) -> bool:
        if not is_open(entry) or entry.dtype != "float32" or not entry.asked.matrix_rows:
            return False
        return bool(self._compressed_count(entry) * self._state.min_compression_rate < entry.element_count)

    def begin_run(self, client: _core.Client, attempt: int) -> None:
        """An exchange of all layers begins. `attempt`: that of `Recovery`, or -1 if there is none."""
        state = self._state
        done = state.iter if attempt < 0 else self._first_iter + attempt
        was_exact, self._is_exact = self._is_exact, done < state.start_powerSGD_iter
        if was_exact or self._is_exact:
            for layer in self._layers:
                if layer.kept_count and not layer.on_servers:
                    client.choose(layer.layer, "ps" if self._is_exact else "auto", 0)
        state.iter = done + 1
        if not self._is_exact:
            self._count_numbers()

    def _count_numbers(self) -> None:
        state = self._state
        state.total_numel_before_compression += self._numbers[0]
        state.total_numel_after_compression += self._numbers[1]
        if state.iter < state.next_stats_report:
            return
        rate, before, after = state.compression_stats()
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency
        logger = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
        logger.info("Compression stats: iter %s, numbers %s, compressed %s, rate %s", state.iter, before, after, rate)
