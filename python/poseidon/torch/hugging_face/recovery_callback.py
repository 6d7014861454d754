"""`RecoveryCallback`: a Trainer that goes on when a worker is lost."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch

from poseidon.adapter.loop_steps import LoopSteps
from poseidon.adapter.state_text import broadcast
from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.hugging_face.alone import number_processes
from poseidon.torch.hugging_face.overlap import TrainerCallback
from poseidon.torch.hugging_face.trainer_data import check_trainer, make_loader, tokens_of
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.process.context import context
from poseidon.torch.recovery.objects import seed_streams, streams_of
from poseidon.torch.recovery.recovery import Recovery

_NUMBERS = ("best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen", "total_flos")
_BEST = _NUMBERS[:3]


class _Progress:
    """What a Trainer counts and remembers from step to step, beside model, optimizer and scheduler."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.has_stopped = False  # others have, by an evaluation for example
        self.is_begun = False  # this process has trained
        self.place = [0, 0]  # of the batches of the step that comes: the epoch, and how many of it they end

    def _counting(self) -> list[Any]:
        handler = self._trainer.callback_handler
        return [one for one in handler.callbacks if callable(getattr(one, "state", None))]

    def state_dict(self) -> dict[str, Any]:
        state = self._trainer.state
        return {
            "numbers": {name: getattr(state, name) for name in _NUMBERS if hasattr(state, name)},
            "callbacks": [one.state()["attributes"] for one in self._counting()],
            "place": list(self.place),
            "stopped": self.has_stopped or self._trainer.control.should_training_stop,
        }

    def load_state_dict(self, found: dict[str, Any]) -> None:
        if self.is_begun:  # it counts the steps and evaluations itself that have come since
            return
        for name, value in found["numbers"].items():
            setattr(self._trainer.state, name, value)
        for one, attributes in zip(self._counting(), found["callbacks"], strict=True):
            vars(one).update(attributes)
        self.place, self.has_stopped = found["place"], found["stopped"]


class RecoveryCallback(TrainerCallback):
    """Makes a Trainer train in attempts of a `poseidon.Recovery`: `trainer.add_callback(RecoveryCallback(trainer))`.

        init_alone()                                # with on_failure=rejoin; before TrainingArguments
        trainer = Trainer(model, TrainingArguments(...), train_dataset=dataset)
        trainer.add_callback(RecoveryCallback(trainer))
        trainer.train()

    Trainer believes to be alone. Each worker trains on its own batches, with the mean of all gradients. It evaluates by
    itself, on all of the data, so all decide alike. Rank 0 writes checkpoints, and loads the best one for all. The
    order of the examples is drawn from `data_seed`, or from `seed` of the TrainingArguments, which also seeds the
    random numbers of each step. Where the loss is a mean over tokens, gradients are weighed by them
    (`average_tokens_across_devices`).

    A step that fails is made again with the same batches. A replacement gets model, optimizer, scheduler, what Trainer
    counts, and `objects`, further ones with a state. Its log and `train_loss` are of the steps that it makes itself.
    `directory`, `every` and `keep` are Recovery's, from which all go on if all are lost. `train()` may be called once.

    Raises InvalidArgument where a replacement would not do what the others do: without `init_alone`, for datasets
    whose examples have no numbers, `resume_from_checkpoint`, samplers and loaders of the program's own, and strategies
    of sampling other than random and in order.
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
        check_trainer(trainer, here.settings.world_size)
        self._trainer, self._objects = trainer, objects
        self._arguments: dict[str, Any] = {"directory": directory, "every": every, "keep": keep}
        self._recovery: Recovery | None = None
        self._steps: LoopSteps | None = None
        self._is_past = False  # the step under way was made before this process began
        self._loss: torch.Tensor | None = None  # of the latest batch
        number_processes()
        self._make_loader, trainer.get_train_dataloader = trainer.get_train_dataloader, self._begin_loading
        self._train_batch, trainer.training_step = trainer.training_step, self._training_step
        self._report, trainer._maybe_log_save_evaluate = trainer._maybe_log_save_evaluate, self._report_step
        self._evaluate, trainer._evaluate = trainer._evaluate, self._evaluate_unless_past
        self._load_best, trainer._load_best_model = trainer._load_best_model, self._load_best_of_all

    @property
    def recovery(self) -> Recovery:
        """The Recovery. Raises InvalidArgument before training has begun."""
        if self._recovery is None:
            raise InvalidArgument("RecoveryCallback has its recovery once train() has begun: ask for it in a callback")
        return self._recovery

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Meets the other workers, with model, optimizer and scheduler as Trainer has just made them."""
        trainer = self._trainer
        optimizer = trainer.optimizer.optimizer
        if state.global_step:
            raise InvalidArgument(
                "resume_from_checkpoint with RecoveryCallback, whose replacements begin elsewhere: pass directory to "
                "RecoveryCallback, from which all go on"
            )
        if isinstance(optimizer, DistributedOptimizer):
            raise InvalidArgument("RecoveryCallback needs updates that are over in their step: leave overlap out")
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

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step is over."""
        assert self._steps is not None
        self._steps.complete()
        self._seed_evaluation()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Waits for the other workers, and gives all the model that rank 0 has loaded."""
        assert self._steps is not None
        if args.load_best_model_at_end and context().control is not None:
            self._steps.backward(self._share_best)
            self._steps.complete()
        self._steps.finish()
        del self._trainer.optimizer.step  # that of this training

    def _seed_evaluation(self) -> None:
        """An evaluation that comes now draws the same numbers on all ranks."""
        seed_streams(self._trainer.args.seed, -1, self._trainer.state.global_step)

    def _report_step(self, *arguments: Any, **more: Any) -> None:
        """Logs, saves and evaluates after a step or an epoch, but for what is past. Rank 0 saves."""
        trainer, rank = self._trainer, context().rank
        control, state = trainer.control, trainer.state
        assert self._steps is not None
        if self._is_past:
            control.should_log = control.should_evaluate = False
            if self._steps.is_made:
                control.should_save = False
            else:  # the next step is that of the others, and the lost worker may not have saved the model before it
                control.should_training_stop = control.should_training_stop or self._progress.has_stopped
                trainer._globalstep_last_logged = state.global_step
        control.should_save = control.should_save and rank == 0
        self._report(*arguments, **more)
        if getattr(state, "best_global_step", None) and rank != 0:
            # Rank 0 looks whether it is there.
            folder = f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = os.path.join(trainer.args.output_dir, folder)

    def _evaluate_unless_past(self, *arguments: Any, **more: Any) -> Any:
        """The evaluation before the first step is past, too, where others have trained."""
        if self._steps is not None and self._steps.is_made:
            return {}
        return self._evaluate(*arguments, **more)

    def _load_best_of_all(self) -> None:
        """Rank 0 loads the best model. The others get it from there (`on_train_end`)."""
        if context().rank == 0:
            self._load_best()

    def _share_best(self) -> bool:
        control, model, state = context().present_control, self._trainer.model, self._trainer.state
        control.broadcast([*model.parameters(), *model.buffers()], 0)
        best = {one: getattr(state, one, None) for one in _BEST} if context().rank == 0 else None
        for name, value in broadcast(best, control, 0).items():
            setattr(state, name, value)
        return True

    def _begin_loading(self) -> Any:
        if self._recovery is not None and context().recovers:
            raise InvalidArgument("train() was called again, where a replacement would begin with the first call")
        self._loader = make_loader(self._trainer, self._make_loader, self._steps_are_made)
        return self._loader

    def _steps_are_made(self) -> bool:
        return self._steps is not None and self._steps.is_made

    def _training_step(self, model: Any, inputs: Any, *counts: Any, **more: Any) -> torch.Tensor:
        assert self._steps is not None
        self._is_past = not inputs and self._steps.is_made
        if self._is_past:
            return torch.zeros((), device=self._trainer.args.device)
        self._note_place()
        synchronizes = self._trainer.accelerator.sync_gradients
        weight = tokens_of(self._trainer.args, *counts, **more)

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

    def _note_place(self) -> None:
        """Raises InvalidArgument if a replacement has come to other batches of the step than the others."""
        progress, place = self._progress, self._loader.place
        if not progress.is_begun and self._recovery is not None and self._recovery.step and progress.place != place:
            raise InvalidArgument(
                f"the others are at batch {progress.place[1]} of epoch {progress.place[0]} in this step, and this "
                f"replacement is at batch {place[1]} of epoch {place[0]}: let no callback end an epoch early"
            )
        progress.is_begun, progress.place = True, list(place)

    def _leave_out_made_updates(self, optimizer: Any, scaler: Any) -> None:
        steps = self._steps
        assert steps is not None
        update = optimizer.step

        @wraps(update)
        def step(*arguments: Any, **more: Any) -> Any:
            if not steps.has_taken:
                return update(*arguments, **more)
            if scaler is not None:  # Trainer's clipping has begun an update of it
                scaler._per_optimizer_states.clear()
            return None

        optimizer.step = step
        steps.guard(self._trainer.lr_scheduler)
