"""A model's part in `torch.distributed.algorithms.Join`."""

from __future__ import annotations

from torch.distributed.algorithms.join import JoinHook

from poseidon.adapter.join import JoinedTraining
from poseidon.torch.training.trained_model import TrainedModel


class ModelJoinHook(JoinHook):
    """A model's part in torch's `Join`, which knows when ranks run out of data. `joined`: None with one worker."""

    def __init__(self, model: TrainedModel, joined: JoinedTraining | None) -> None:
        self._model, self._joined = model, joined

    def main_hook(self) -> None:
        """Takes part in the others' next step."""
        if self._joined is not None:
            self._joined.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data: all take over the model of those that trained longest."""
        if self._joined is not None:
            self._joined.take_last_model()
        self._model.end_join(self._joined)
