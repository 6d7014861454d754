"""What a wrapped model does about batches of different sizes."""

from __future__ import annotations

from abc import abstractmethod

from poseidon.torch.training.trained_model import TrainedModel


class WeightedModel:
    """The methods of `DistributedDataParallel` about weights."""

    @abstractmethod
    def trained_model(self) -> TrainedModel:
        """The model's part in the job."""

    def set_weight(self, weight: int) -> None:
        """Says how many rows this rank's next gradients are the mean of, until the next call.

        Then each result is the mean over all rows of all ranks, Σ(w·g)/Σw, and not over the ranks. So ranks may take
        batches of different sizes. Collective: all ranks call it before the same forward pass. It waits for nobody. A
        rank without rows has weight 0 and takes part in the backward pass. With Recovery, call it in each attempt.
        Raises InvalidArgument for a negative weight, with a communication hook, inside join(), and with
        stragglers=drop, consistency=ssp or async.
        """
        self.trained_model().set_weight(weight)
