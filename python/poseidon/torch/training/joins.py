"""Training with a different number of batches on each rank: `model.join()`, and the model's part in torch's `Join`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from poseidon.adapter.features import Features
from poseidon.adapter.join import JoinedTraining
from poseidon.errors import PoseidonError
from poseidon.torch.process.context import memberships
from poseidon.torch.training.trained_model import TrainedModel, Wrapper


@dataclass(frozen=True)
class TorchJoin:
    """A model's place in the last torch `Join` of which it is a part.

    torch's class never says that one is over, or is used again. So its steps are asked about until the next one, as
    torch's own class does: what one rank does then, all do.
    """

    joinables: object  # the same for all of one Join
    divides_by_initial: bool
    call_idle: Callable[[], None]


class ModelJoinHook(JoinHook):
    """A model's part in torch's `Join`, which knows when ranks run out of data."""

    def __init__(self, model: TrainedModel, place: TorchJoin) -> None:
        self.place = place
        self._model = model

    def main_hook(self) -> None:
        """Takes part in the others' next step."""
        joined = _begin_again(self._model)
        if joined is not None:
            joined.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has data: all take over the model of those that trained longest."""
        joined = self._model.join
        if joined is not None:
            joined.take_last_model()
            self._model.end_join(joined)


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
        trained = self.trained_model()
        place = TorchJoin(object(), divide_by_initial_world_size, lambda: None)
        _check(trained, place)
        joined = _begin(trained, place, throws=throw_on_early_termination)
        try:
            yield
            joined.shadow_others()
        finally:
            trained.end_join(joined)

    # As a `Joinable`.

    def join_hook(self, **kwargs: Any) -> Any:
        """The model's part in a `torch.distributed.algorithms.Join`, alone or with other models or optimizers."""
        trained, this = self.trained_model(), weakref.ref(self)
        trained.end_join(trained.join)  # the last one, which ended by an error or was perhaps used again
        trained.torch_join = None
        by_initial = kwargs.get("divide_by_initial_world_size", True)
        place = TorchJoin(_joinables.of_next(), by_initial, lambda: _call_idle(this()))
        hook = ModelJoinHook(trained, place)
        self.__dict__["_join_hook"] = weakref.ref(hook)
        return hook

    @property
    def _join_config(self) -> _JoinConfig:
        config: _JoinConfig | None = self.__dict__.get("_config_of_join")
        return _JoinConfig.construct_disabled_join_config() if config is None else config

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        """A `Join` sets it when it has all hooks: only now it is known whether it does anything."""
        self.__dict__["_config_of_join"] = config
        _joinables.are_complete()
        reference = self.__dict__.pop("_join_hook", None)
        hook: ModelJoinHook | None = None if reference is None else reference()
        if not config.enable or hook is None or self.trained_model().sync is None:
            return
        trained = self.trained_model()
        _check(trained, hook.place)
        # A rank without data does not help the others if it raises.
        joined = _begin(trained, hook.place, certain=not config.throw_on_early_termination)
        trained.torch_join = hook.place
        # An error in the program has ended it if its object, which holds this one, goes before it is over.
        weakref.finalize(hook, trained.end_join, joined).atexit = False

    def _present_join(self) -> JoinedTraining | None:
        return _begin_again(self.trained_model())

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


class _Joinables:
    """Tells which models are in one `Join`. It asks all of them for their hooks before it tells any that it begins."""

    def __init__(self) -> None:
        self._next: object | None = None

    def of_next(self) -> object:
        if self._next is None:
            self._next = object()
        return self._next

    def are_complete(self) -> None:
        self._next = None


_joinables = _Joinables()


def _check(trained: TrainedModel, place: TorchJoin) -> None:
    """Raises InvalidArgument if the model cannot be joined here and now."""
    if _is_other_join_under_way(place.joinables):
        Features.refuse("other_join", "join")
    trained.features.check("join")


def _begin(trained: TrainedModel, place: TorchJoin, certain: bool = True, throws: bool = False) -> JoinedTraining:
    control = trained.context.present_control
    joined = JoinedTraining(trained, control, place.divides_by_initial, throws, place.call_idle, place.joinables)
    if certain:
        trained.enter_join(joined)
    trained.join = joined
    return joined


def _begin_again(trained: TrainedModel) -> JoinedTraining | None:
    """The join of the model that is under way, if one is or may be.

    Until a rank has no data nobody knows whether the pass is inside the `Join`, and nothing is refused for it.
    """
    place = trained.torch_join
    if trained.join is None and place is not None and not _is_other_join_under_way(place.joinables):
        _begin(trained, place, certain=False)
    return trained.join


def _is_other_join_under_way(joinables: object) -> bool:
    """In which a rank without data would help in the steps of other models alone."""
    under_way = [here.joined for here in memberships() if here.joined is not None]
    return any(joined.joinables is not joinables for joined in under_way)


def _call_idle(model: Any) -> None:
    """Ends the waiting of ranks without data for the next step of torch's `Join`, of which this model is a part."""
    if not model._join_config.is_first_joinable:
        Features.refuse("unjoined", "join")  # only the first one can call them
    Join.notify_join_context(model)
