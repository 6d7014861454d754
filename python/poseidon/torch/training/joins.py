"""Training with a different number of batches on each rank: `model.join()`, and the model's part in torch's `Join`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from poseidon.adapter.features import Features
from poseidon.adapter.join import JoinedTraining
from poseidon.errors import PoseidonError
from poseidon.torch.process.context import memberships
from poseidon.torch.training.trained_model import TrainedModel, Wrapper


class ModelJoinHook(JoinHook):
    """A model's part in torch's `Join`, which knows when ranks run out of data.

    A `Join` may be used again, and says nothing when it is: the first training pass after its end begins it. Steps
    after the end of one that the program keeps are as in one, as those of torch's class are.
    """

    def __init__(self, model: TrainedModel, divide_by_initial_world_size: bool) -> None:
        self.divides_by_initial = divide_by_initial_world_size
        self.in_other_join = _is_any_join_under_way()
        self.begin: Callable[[], JoinedTraining] | None = None  # not if the Join is disabled, and with one worker
        self.joined: JoinedTraining | None = None  # while the Join is under way
        self.was_used = False
        self._model = model

    def start(self) -> None:
        """Begins, unless it has. Its ranks' next exchange is that of a step of the model."""
        if self.begin is None or self.joined is not None:
            return
        self.joined = self.begin()
        self.joined.may_be_over = self.was_used
        # torch's class does not say when a join ends by an error. Its object, which holds this one, goes then.
        weakref.finalize(self, self._model.end_join, self.joined).atexit = False

    def end(self) -> None:
        """The ranks make the same steps again."""
        self._model.end_join(self.joined)
        self.joined, self.was_used = None, True

    def main_hook(self) -> None:
        """Takes part in the others' next step."""
        self.start()
        if self.joined is not None:
            self.joined.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data: all take over the model of those that trained longest."""
        if self.joined is not None:
            self.joined.take_last_model()
            self.end()


class ModelJoins(Wrapper):
    """The methods of `DistributedDataParallel` for ranks that run out of data at different times."""

    process_group: Any
    device: torch.device

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Trains with a different number of batches on each rank. A rank without data takes part without contributing.

        Gradients are divided by the world size or, with `divide_by_initial_world_size=False`, by the number of ranks
        that still have data. With `throw_on_early_termination` all ranks raise an error when one has no data left. In
        the end every rank has the model of the ranks that trained longest. If torch.distributed is initialized, this
        is its `Join` for this model alone. What takes all ranks and is no step of this model raises InvalidArgument on
        all ranks as soon as one has no data.
        """
        if not enable or self.trained_model().sync is None:
            return nullcontext()
        if self.process_group is None:
            return self._join_alone(divide_by_initial_world_size, throw_on_early_termination)
        context: Any = Join(
            [self],  # type: ignore[list-item]  # a `Joinable` by torch's class, of which it is a part
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        return context  # type: ignore[no-any-return]

    @contextmanager
    def _join_alone(self, divide_by_initial_world_size: bool, throw_on_early_termination: bool) -> Iterator[None]:
        if _is_any_join_under_way():
            Features.refuse("other_join", "join")
        trained = self.trained_model()
        joined = _begin(trained, divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
            joined.shadow_others()
        finally:
            trained.end_join(joined)

    # As a `Joinable`.

    def join_hook(self, **kwargs: Any) -> Any:
        """The model's part in a `torch.distributed.algorithms.Join`, alone or with other models or optimizers."""
        trained = self.trained_model()
        last = trained.join_hook()
        if last is not None and last.was_used:
            last.end()  # it has begun again with a step outside, and this one takes its place
        hook = ModelJoinHook(trained, kwargs.get("divide_by_initial_world_size", True))
        trained.join_hook = weakref.ref(hook)
        return hook

    def _join_again(self) -> None:
        """A training pass begins outside of all joins, or in a `Join` that was used before."""
        hook = self.trained_model().join_hook()
        if hook is not None:
            hook.start()

    @property
    def _join_config(self) -> _JoinConfig:
        config: _JoinConfig | None = self.__dict__.get("_config_of_join")
        return _JoinConfig.construct_disabled_join_config() if config is None else config

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        """A `Join` sets it when it has all hooks: only now it is known whether it does anything."""
        self.__dict__["_config_of_join"] = config
        if not config.enable or self.trained_model().sync is None:
            return
        hook = self.trained_model().join_hook()
        if hook.in_other_join:
            Features.refuse("other_join", "join")
        trained, this = self.trained_model(), weakref.ref(self)
        hook.begin = partial(_begin, trained, hook.divides_by_initial, False, lambda: _call_idle(this()))
        hook.start()

    @property
    def _authoritative_rank(self) -> int | None:
        return self.trained_model().last_joined

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` keeps what it exchanges."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group over which `Join` counts the ranks. PoseidonError if torch.distributed is not initialized."""
        if self.process_group is None:
            raise PoseidonError(
                "torch.distributed.algorithms.Join needs torch.distributed: call init_process_group() before wrapping "
                "the model, or use model.join(), which needs none"
            )
        return self.process_group


def _begin(
    trained: TrainedModel, divides_by_initial: bool, throws: bool, call_idle: Callable[[], None] = lambda: None
) -> JoinedTraining:
    trained.features.add("join")
    here = trained.context
    joined = trained.join = JoinedTraining(trained, here.present_control, divides_by_initial, throws, call_idle)
    if here.joined is None:
        here.joined = joined
    return joined


def _is_any_join_under_way() -> bool:
    """In which a rank without data would help in the steps of one model alone."""
    return any(here.joined is not None and not here.joined.may_be_over for here in memberships())


def _call_idle(model: Any) -> None:
    """Ends the waiting of ranks without data for the next step of torch's `Join`, of which this model is a part."""
    if not model._join_config.is_first_joinable:
        Features.refuse("unjoined", "join")  # only the first one can call them
    Join.notify_join_context(model)
