"""What a Trainer trains on that believes to be alone: the batches of one of several workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.torch.elastic import count_of
from poseidon.torch.hugging_face.overlap import transformers
from poseidon.torch.recovery.shares import RankLoader, RankSampler


class Loader(RankLoader):
    """`is_past` says whether the next step has been made: its batches are empty."""

    def __init__(self, loader: Any, sampler: RankSampler, is_past: Callable[[], bool]) -> None:
        super().__init__(loader, sampler)
        self._is_past = is_past
        self.place = [0, 0]  # the epoch, and the batches that it has given of it

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._sampler.set_epoch(epoch)
        self.place = [epoch, 0]

    def __iter__(self) -> Iterator[Any]:
        past = 0
        while past < len(self) and self._is_past():
            past += 1
            self.place[1] += 1
            yield {}
        self._sampler.first_step = past
        for batch in self._loader if past < len(self) else ():
            self.place[1] += 1
            yield batch


def make_loader(trainer: Any, make: Callable[[], Any], is_past: Callable[[], bool]) -> Loader:
    """The loader that `make`, Trainer's own method, makes of this rank's examples.

    Raises InvalidArgument if the program's Trainer chooses examples by itself.
    """
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffles = _strategy(args) == "random"
    sampler = RankSampler(trainer.train_dataset, seed, shuffles, args.train_batch_size, args.dataloader_drop_last)
    usual = vars(transformers.Trainer).get("_get_train_sampler")
    is_usual = getattr(type(trainer)._get_train_sampler, "__code__", None) is getattr(usual, "__code__", None)
    trainer._get_train_sampler = lambda *_: sampler
    loader = make()
    if not is_usual or getattr(getattr(loader, "batch_sampler", None), "sampler", None) is not sampler:
        raise InvalidArgument(
            f"{type(trainer).__name__} has a loader or sampler of its own, and RecoveryCallback deals the examples: "
            "leave get_train_dataloader and _get_train_sampler as they are, or write a loop with poseidon.Recovery"
        )
    return Loader(loader, sampler, is_past)


def check_trainer(trainer: Any, world_size: int) -> None:
    """Raises InvalidArgument for a Trainer that replacements could not follow. `world_size`: of the job."""
    args = trainer.args
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
    count_of(trainer.train_dataset)
    if _strategy(args) not in ("random", "sequential"):
        raise InvalidArgument(
            f"RecoveryCallback deals the examples at random or in order, and not by {_strategy(args)}: choose another "
            "train_sampling_strategy"
        )


def _strategy(args: Any) -> str:
    """How examples are chosen, also in versions that have an option for one way alone."""
    known = "group_by_length" if getattr(args, "group_by_length", False) else "random"
    return str(getattr(args, "train_sampling_strategy", known))


def tokens_of(args: Any, num_items_in_batch: Any = None) -> int | None:
    """The tokens over which this rank's gradients are a mean, if the gradients of all are to be one over all tokens."""
    if num_items_in_batch is None or not getattr(args, "average_tokens_across_devices", False):
        return None
    return int(num_items_in_batch)
