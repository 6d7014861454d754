"""`RecoveryCallback`: a Trainer that goes on when a worker is lost."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from poseidon.adapter.elastic_order import ElasticOrder
from poseidon.adapter.loop_steps import LoopSteps
from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.hugging_face.alone import number_processes
from poseidon.torch.hugging_face.overlap import TrainerCallback
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.process.context import context
from poseidon.torch.recovery.objects import seed_streams, streams_of
from poseidon.torch.recovery.recovery import Recovery
from poseidon.torch.recovery.shares import RankSampler

_NUMBERS = ("best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen", "total_flos")


class _Progress:
    """What a Trainer counts and remembers from step to step, beside model, optimizer and scheduler."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.has_stopped = False  # others have, by an evaluation for example
        self.is_begun = False  # this process has trained

    def _counting(self) -> list[Any]:
        handler = self._trainer.callback_handler
        return [one for one in handler.callbacks if callable(getattr(one, "state", None))]

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "numbers": {name: getattr(state, name) for name in _NUMBERS if hasattr(state, name)},
            "callbacks": [one.state()["attributes"] for one in self._counting()],
            "stopped": self.has_stopped or self._trainer.control.should_training_stop,
        }

    def load_state_dict(self, found: dict[str, Any]) -> None:
        if self.is_begun:  # it counts the steps and evaluations itself that have come since
            return
        for name, value in found["numbers"].items():
            setattr(self._trainer.state, name, value)
        for one, attributes in zip(self._counting(), found["callbacks"], strict=True):
            vars(one).update(attributes)
        self.has_stopped = found["stopped"]


class _Loader:
    """A loader of a RankSampler. `is_past` says whether the next step has been made: its batches are empty.

    Everything else is the loader's.
    """

    def __init__(self, loader: Any, sampler: RankSampler, is_past: Callable[[], bool]) -> None:
        self._loader, self._sampler, self._is_past = loader, sampler, is_past

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        past = 0
        while past < len(self) and self._is_past():
            past += 1
            yield {}
        self._sampler.first_step = past
        if past < len(self):
            yield from self._loader


class RecoveryCallback(TrainerCallback):
    """Makes a Trainer train in attempts of a `poseidon.Recovery`: `trainer.add_callback(RecoveryCallback(trainer))`.

        init_alone()                                # with on_failure=rejoin; before TrainingArguments
        trainer = Trainer(model, TrainingArguments(...), train_dataset=dataset)
        trainer.add_callback(RecoveryCallback(trainer))
        trainer.train()

    Trainer believes to be alone. Each worker trains on its own batches, with the mean of all gradients. It evaluates by
    itself, on all of the data, so all decide alike. Rank 0 writes checkpoints. The order of the examples is drawn from
    `data_seed`, or from `seed` of the TrainingArguments, which also seeds the random numbers of each step. Where the
    loss is a mean over tokens, gradients are weighed by them (`average_tokens_across_devices`).

    A step that fails is made again with the same batches. A replacement gets model, optimizer, scheduler, what Trainer
    counts, and `objects`, further ones with a state; its log has the steps that it makes itself. `directory`, `every`
    and `keep` are Recovery's, from which all go on if all are lost. `train()` may be called once.

    Raises InvalidArgument where a replacement would not do what the others do: without `init_alone`, for datasets
    whose examples have no numbers, `resume_from_checkpoint`, and strategies of sampling other than random and in order.
    """

    def __init__(
        self,
        trainer: Any,
        *objects: Any,
        directory: str | os.PathLike[str] | None = None,
        every: int = 100,
        keep: int = 2,
    ) -> None:
        here = context()
        here.features.add("fixed_loop", type(self).__name__)
        _check(trainer, here.settings.world_size)
        self._trainer, self._objects = trainer, objects
        self._arguments: dict[str, Any] = {"directory": directory, "every": every, "keep": keep}
        self._recovery: Recovery | None = None
        self._steps: LoopSteps | None = None
        self._is_past = False  # the step under way was made before this process began
        self._loss: torch.Tensor | None = None  # of the latest batch
        number_processes()
        self._make_loader, trainer.get_train_dataloader = trainer.get_train_dataloader, self._loader
        self._train_batch, trainer.training_step = trainer.training_step, self._training_step

    @property
    def recovery(self) -> Recovery:
        """The Recovery. Raises InvalidArgument before training has begun."""
        if self._recovery is None:
            raise InvalidArgument("RecoveryCallback has its recovery once train() has begun: ask for it in a callback")
        return self._recovery

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Meets the other workers, with model, optimizer and scheduler as Trainer has just made them."""
        trainer, here = self._trainer, context()
        optimizer = trainer.optimizer.optimizer
        if state.global_step:
            raise InvalidArgument(
                "resume_from_checkpoint with RecoveryCallback, whose replacements begin elsewhere: pass directory to "
                "RecoveryCallback, from which all go on"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise InvalidArgument("RecoveryCallback needs updates that are over in their step: leave overlap out")
        if self._recovery is not None and here.recovers:
            raise InvalidArgument("train() was called again, where a replacement would begin with the first call")
        model = trainer.model_wrapped
        self._model = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model)
        scaler = trainer.accelerator.scaler
        self._progress = _Progress(trainer)
        self._recovery = Recovery(
            *(self._model, optimizer, trainer.lr_scheduler, self._progress),
            *([] if scaler is None else [scaler]),
            *self._objects,
            seed=args.seed,
            **self._arguments,
        )
        self._steps = LoopSteps(self._recovery, partial(streams_of, self._model))
        self._leave_out_made_updates(trainer.optimizer, scaler)
        self._seed_evaluation()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The step is over. What the others have logged, saved and evaluated is left out here."""
        assert self._steps is not None
        self._steps.complete()
        self._seed_evaluation()
        return self._left_out(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """The epoch is over. What the others have done after it is left out here."""
        return self._left_out(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits for the other workers."""
        assert self._steps is not None
        self._steps.finish()

    def _seed_evaluation(self) -> None:
        """An evaluation that comes now draws the same numbers on all ranks."""
        seed_streams(self._trainer.args.seed, -1, self._trainer.state.global_step)

    def _left_out(self, control: Any) -> Any:
        if self._is_past:
            control.should_log = control.should_save = control.should_evaluate = False
            assert self._steps is not None
            if not self._steps.is_made:  # the next step is that of the others
                control.should_training_stop = control.should_training_stop or self._progress.has_stopped
                self._trainer._globalstep_last_logged = self._trainer.state.global_step
        return control

    def _loader(self) -> _Loader:
        trainer, here = self._trainer, context()
        args = trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        order = ElasticOrder(len(trainer.train_dataset), seed, _shuffles(args))
        rank, size = here.data_part
        sampler = RankSampler(order, args.train_batch_size, rank, size, args.dataloader_drop_last)
        trainer._get_train_sampler = lambda *_: sampler
        return _Loader(self._make_loader(), sampler, self._steps_are_made)

    def _steps_are_made(self) -> bool:
        return self._steps is not None and self._steps.is_made

    def _training_step(self, model: Any, inputs: Any, *counts: Any, **more: Any) -> torch.Tensor:
        assert self._steps is not None
        self._is_past = not inputs and self._steps.is_made
        self._progress.is_begun = not self._is_past
        if self._is_past:
            return torch.zeros((), device=self._trainer.args.device)
        synchronizes = self._trainer.accelerator.sync_gradients
        weight = _tokens(self._trainer.args, *counts, **more)

        def make() -> torch.Tensor:
            if weight is not None:
                self._model.set_weight(weight)
            with nullcontext() if synchronizes else self._model.no_sync():
                return self._train_batch(self._model, copy.copy(inputs), *counts, **more)  # type: ignore[no-any-return]

        loss = self._steps.backward(make)
        if loss is None:  # others have made the step, and this rank has its results
            return torch.zeros((), device=self._trainer.args.device) if self._loss is None else self._loss
        self._loss = loss
        return loss  # type: ignore[no-any-return]

    def _leave_out_made_updates(self, optimizer: Any, scaler: Any) -> None:
        steps = self._steps
        assert steps is not None
        update = optimizer.step

        def step(*arguments: Any, **more: Any) -> Any:
            if not steps.has_taken:
                return update(*arguments, **more)
            if scaler is not None:  # Trainer's clipping has begun an update of it
                scaler._per_optimizer_states.clear()
            return None

        optimizer.step = step
        steps.guard(self._trainer.lr_scheduler)


def _check(trainer: Any, world_size: int) -> None:
    args, dataset = trainer.args, trainer.train_dataset
    if world_size > 1 and args.world_size > 1:
        raise InvalidArgument(
            "Trainer has met the other processes, and cannot meet a replacement: call init_alone() of "
            "poseidon.torch.hugging_face first, in the place of poseidon.init()"
        )
    if args.n_gpu > 1:
        raise InvalidArgument(
            f"Trainer would use {args.n_gpu} GPUs in this process: start a worker for each, and call init_alone() "
            "before CUDA is used"
        )
    if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidArgument(
            f"the train_dataset is a {type(dataset).__name__}, whose examples have no numbers: give one with __len__ "
            "and __getitem__"
        )
    if _strategy(args) not in ("random", "sequential"):
        raise InvalidArgument(
            f"RecoveryCallback deals the examples at random or in order, and not by {_strategy(args)}: choose another "
            "train_sampling_strategy"
        )


def _strategy(args: Any) -> str:
    """How examples are chosen, also in versions that have an option for one way alone."""
    known = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    return str(getattr(args, "train_sampling_strategy", known))


def _shuffles(args: Any) -> bool:
    return _strategy(args) == "random"


def _tokens(args: Any, num_items_in_batch: Any = None) -> int | None:
    """The tokens over which this rank's gradients are a mean, if the gradients of all are to be one over all tokens."""
    if num_items_in_batch is None or not getattr(args, "average_tokens_across_devices", False):
        return None
    return int(num_items_in_batch)
