"""`RecoveryStrategy`: Lightning's Trainer goes on when a worker is lost."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from poseidon.adapter.loop_steps import LoopSteps
from poseidon.errors import InvalidArgument, ShutDown
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.elastic import count_of
from poseidon.torch.lightning.package import imported_package
from poseidon.torch.process.context import context, init
from poseidon.torch.recovery.objects import seed_streams, streams_of
from poseidon.torch.recovery.recovery import Recovery
from poseidon.torch.recovery.shares import RankLoader, RankSampler


class _Progress:
    """Where a fit is: its counters and what its callbacks remember. A replacement begins there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self._left_out = 0  # batches of the epoch with which this process begins
        self.steps: LoopSteps | None = None

    def state_dict(self) -> dict[str, Any]:
        batches, passes = self._loop.epoch_loop.batch_progress, 0 if self.steps is None else self.steps.pass_count
        return {
            "epoch": self._loop.epoch_progress.current.processed,
            "batch": max(0, batches.current.ready - passes),
            "batches": max(0, batches.total.ready - passes),
            "updates": self._loop.epoch_loop.global_step,
            "stops": self._trainer.should_stop,
            "callbacks": [one.state_dict() for one in self._trainer.callbacks],
        }

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        if self.steps is not None and self.steps.has_trained:
            return  # it counts by itself, and its callbacks hear of what has come since
        loop, trainer = self._loop.epoch_loop, self._trainer
        for counter in (self._loop.epoch_progress.current, self._loop.epoch_progress.total):
            _set(counter, found["epoch"])
        _set(loop.batch_progress.total, found["batches"])
        updates = loop.automatic_optimization.optim_progress.optimizer
        for counter in (updates.step.total, updates.zero_grad.total):
            _set(counter, found["updates"])
        loop._batches_that_stepped = found["updates"]
        trainer.should_stop = found["stops"]
        for one, state in zip(trainer.callbacks, found["callbacks"], strict=True):
            one.load_state_dict(state)
        self._left_out = found["batch"]

    def begin_epoch(self) -> int:
        """An iteration over an epoch begins. Returns how many batches are left out, because they are past."""
        count, self._left_out = self._left_out, 0
        if count:
            _set(self._loop.epoch_loop.batch_progress.current, count)
            self._loop._data_fetcher.fetched = count
        return count


def _set(counter: Any, count: int) -> None:
    for name in vars(counter):
        setattr(counter, name, count)


class _Loader(RankLoader):
    """One that begins in the midst of its first epoch."""

    def __init__(self, loader: Any, sampler: RankSampler, begin_epoch: Callable[[], int]) -> None:
        super().__init__(loader, sampler)
        self._begin_epoch = begin_epoch
        self.is_begun = False

    def __iter__(self) -> Iterator[Any]:
        self.is_begun = True
        self._sampler.first_step = self._begin_epoch()
        yield from self._loader


def recovery_strategy_class(package: str) -> type[Any]:
    """RecoveryStrategy for the Trainer of `package`: lightning.pytorch or pytorch_lightning."""
    base: Any = importlib.import_module(f"{package}.strategies").SingleDeviceStrategy
    data = importlib.import_module(f"{package}.utilities.data")
    callback: Any = importlib.import_module(f"{package}.callbacks").Callback

    class _Completes(callback):  # type: ignore[misc]
        """Tells the strategy that a batch is over, with its update and the steps of schedulers."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.complete()

    class RecoveryStrategy(base):  # type: ignore[misc]
        """Lightning trains in attempts of a `poseidon.Recovery`: `Trainer(strategy=RecoveryStrategy(), devices=1)`.

        Lightning believes to be alone. Each worker trains on its own batches, with the mean of all gradients. It
        validates by itself, on all of the data, so all decide alike. Rank 0 writes files. Training loaders are dealt to
        the workers, at random where they shuffle.

        A step that fails is made again with the same batches. A replacement gets model, optimizer, schedulers,
        callbacks, the place in the epoch, and `objects`, further ones with a state. Each step's random numbers come
        from `seed`. `directory`, `every` and `keep` are Recovery's; `options` are those of `poseidon.init()`, which the
        strategy calls unless the program has. `device` is the worker's GPU, or the CPU.

        Raises InvalidArgument where a replacement would not do what the others do: with manual optimization,
        `ckpt_path`, loaders whose examples have no numbers or are chosen by a sampler of their own, and a second fit.
        """

        def __init__(
            self,
            *objects: Any,
            seed: int = 0,
            directory: str | os.PathLike[str] | None = None,
            every: int = 100,
            keep: int = 2,
            options: Mapping[str, Any] | None = None,
            device: torch.device | str | None = None,
            **arguments: Any,
        ) -> None:
            super().__init__(device=_device() if device is None else device, **arguments)
            self._objects, self._seed = objects, seed
            self._recovery_arguments: dict[str, Any] = {"directory": directory, "every": every, "keep": keep}
            self._options = {} if options is None else options
            self._steps: LoopSteps | None = None
            self._progress: _Progress | None = None
            self._loader: _Loader | None = None
            self._updated = False  # the batch under way is the last one of its step
            self.recovery: Recovery | None = None
            """The Recovery, once a fit has begun."""

        @property
        def is_global_zero(self) -> bool:
            """Whether this process writes files."""
            return int(self.global_rank) == 0

        def setup_environment(self) -> None:
            """Joins the job, unless the program has."""
            try:
                here = context()
            except ShutDown:
                init(**self._options)
                here = context()
            here.features.add("fixed_loop", type(self).__name__)
            self.global_rank = here.rank
            super().setup_environment()

        def _setup_model(self, model: Any) -> Any:
            return DistributedDataParallel(model) if self._fits() else model

        def setup(self, trainer: Any) -> None:
            """Meets the other workers, with model, optimizer and schedulers as they are at the start."""
            fits = self._fits()
            if fits:
                _check(trainer, self.recovery)
                trainer.callbacks.insert(0, _Completes())
                self._progress = _Progress(trainer)
            super().setup(trainer)
            if not fits:
                return
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.recovery = Recovery(
                *(self.model, *self.optimizers, *schedulers, self._progress),
                *([] if scaler is None else [scaler]),
                *self._objects,
                seed=self._seed,
                **self._recovery_arguments,
            )
            self._steps = LoopSteps(self.recovery, partial(streams_of, self.model))
            self._steps.begin_at(self.recovery.step)
            assert self._progress is not None
            self._progress.steps = self._steps
            for scheduler in schedulers:
                self._steps.guard(scheduler)
            self._attempt_passes(trainer.fit_loop)
            self._seed_validation()

        def process_dataloader(self, dataloader: Any) -> Any:
            """Gives a training loader the batches of this worker."""
            trainer = self.lightning_module.trainer
            if not self._fits() or not trainer.training:
                return dataloader
            assert self._progress is not None
            if self._loader is not None and not self._loader.is_begun:
                raise InvalidArgument(
                    "RecoveryStrategy deals the examples of one training loader, and there are several: give one, of "
                    "all datasets"
                )
            sampler = _sampler_of(dataloader, self._seed)
            loader = data._update_dataloader(dataloader, sampler)
            self._loader = _Loader(loader, sampler, self._progress.begin_epoch)
            return self._loader

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **more: Any) -> Any:
            """Makes the update, unless the state has it from others."""
            assert self._steps is not None
            self._updated = True
            result = closure()
            if not self._steps.has_taken:
                super().optimizer_step(optimizer, lambda: result, model, **more)
            return result

        def complete(self) -> None:
            """A batch is over."""
            updated, self._updated = self._updated, False
            if updated:
                assert self._steps is not None
                self._steps.complete()
                self._seed_validation()

        def on_train_end(self) -> None:
            """Waits for the other workers."""
            assert self._steps is not None
            self._steps.finish()

        def _fits(self) -> bool:
            return bool(self.lightning_module.trainer.state.fn == "fit")

        def _seed_validation(self) -> None:
            """A validation that comes now draws the same numbers on all ranks."""
            assert self.recovery is not None
            seed_streams(self._seed, -1, self.recovery.step)

        def _attempt_passes(self, loop: Any) -> None:
            """Makes every call of a closure of the loop a backward pass of a step."""
            optimization = loop.epoch_loop.automatic_optimization
            make_closure = optimization._make_closure

            def made(*arguments: Any) -> Any:
                closure = make_closure(*arguments)
                run = closure.closure

                def closure_of_step(*_: Any, **__: Any) -> Any:
                    assert self._steps is not None
                    accumulates = loop._should_accumulate()  # now, not when the step is made again

                    def attempt() -> Any:
                        with self.model.no_sync() if accumulates else nullcontext():
                            made = run()
                        if made.closure_loss is None:
                            raise InvalidArgument(
                                "training_step returned None, and the other workers wait for its gradients: return a "
                                "loss in every step, 0 * loss for a batch that is not to count"
                            )
                        return made

                    result = self._steps.backward(attempt)
                    return optimization.output_result_cls(closure_loss=None) if result is None else result

                closure.closure = closure_of_step
                return closure

            optimization._make_closure = made

    RecoveryStrategy.__qualname__ = "RecoveryStrategy"
    return RecoveryStrategy


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _check(trainer: Any, before: Recovery | None) -> None:
    if before is not None and context().recovers:
        raise InvalidArgument("fit() was called again, where a replacement would begin with the first call")
    if not trainer.lightning_module.automatic_optimization:
        raise InvalidArgument(
            "RecoveryStrategy makes steps again that fail, and with manual optimization the module makes them: write a "
            "loop with poseidon.Recovery"
        )
    for one in trainer.callbacks:
        if getattr(type(one), "on_save_checkpoint", None) not in (None, _usual_hook(type(one))):
            raise InvalidArgument(
                f"{type(one).__name__} keeps what it remembers by on_save_checkpoint, and a replacement does not get "
                "that: leave it out, or give it state_dict() and load_state_dict() instead"
            )
    if trainer.ckpt_path is not None:
        raise InvalidArgument(
            "ckpt_path with RecoveryStrategy, whose replacements begin elsewhere: pass directory to RecoveryStrategy, "
            "from which all go on"
        )


def _usual_hook(kind: type[Any]) -> Any:
    """The hook of Lightning's own class, which does nothing."""
    base = next(one for one in reversed(kind.__mro__) if one is not object)
    return getattr(base, "on_save_checkpoint", None)


def _sampler_of(loader: Any, seed: int) -> RankSampler:
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    count_of(dataset)
    if not _deals_all(sampler, dataset) or loader.batch_size is None:
        raise InvalidArgument(
            f"a training loader has a {type(sampler).__name__} of its own, and RecoveryStrategy deals the examples: "
            "use shuffle and batch_size"
        )
    return RankSampler(dataset, seed, isinstance(sampler, RandomSampler), loader.batch_size, loader.drop_last)


def _deals_all(sampler: Any, dataset: Any) -> bool:
    """Whether it is what DataLoader makes by itself: all examples once, in order or not."""
    if type(sampler) is RandomSampler:
        return sampler.data_source is dataset and not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler and sampler.data_source is dataset


RecoveryStrategy = recovery_strategy_class(imported_package())
