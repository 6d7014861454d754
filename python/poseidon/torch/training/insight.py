"""What a wrapped model tells about its exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poseidon.adapter.plan_table import PlanTable
from poseidon.adapter.stats import LayerSynchronization, StepRecord
from poseidon.torch.training.trained_model import Wrapper


class ModelInsight(Wrapper):
    """The methods of `DistributedDataParallel` that tell how its gradients are exchanged."""

    def plan(self, link_bits_per_s: float | None = None) -> PlanTable:
        """The plan of the next step, layer by layer: scheme, bytes, predicted and measured time, and the reason.

        The prediction is for the rates that were measured or, with a link rate, for ports of that rate. With updates on
        the workers the plan also has the urgency and priority class of each layer.
        """
        return self.trained_model().plan(link_bits_per_s)

    def choices(self) -> list[dict[str, Any]]:
        """The log of the schemes that were chosen by time (docs/choice.md), as plain data: step, layer, scheme, reason.

        It is the same on all ranks.
        """
        sync = self.trained_model().sync
        return [] if sync is None else sync.layers.choices.log()

    def replay_choices(self, log: Sequence[dict[str, Any]], step: int = 0) -> None:
        """Takes the log of another run of the same model, whose step `step` comes next.

        With revise="off" no other choices are made: the run has the bits of the other one. Collective. Raises
        InvalidArgument for the log of another model, and Mismatch if the ranks give different ones.
        """
        sync = self.trained_model().sync
        if sync is not None:
            sync.settle()
            sync.layers.choices.replay(list(log), step)

    def record(self, enabled: bool = True) -> None:
        """Records the timing of every synchronizing step from now on, for `recorded_steps()`."""
        self.trained_model().recorder.enabled = enabled

    def recorded_steps(self) -> list[StepRecord]:
        """The steps since `record(True)`, oldest first. Waits for gradients in flight."""
        trained = self.trained_model()
        if trained.sync is not None:
            trained.sync.settle()
        return list(trained.recorder.steps)

    def synchronization_stats(self) -> list[LayerSynchronization]:
        """The figures of the last step's synchronization, by layer in the order of backward. Empty with one worker.

        Waits for gradients in flight.
        """
        trained = self.trained_model()
        if trained.sync is None or trained.context.client is None:
            return []
        trained.sync.settle()
        run = trained.sync.runs.last
        return [] if run is None else StepRecord.of(run, trained.context.client).layers
