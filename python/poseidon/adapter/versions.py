"""The workers' part of the versions that servers save, so that a job with update="server" can go back to a version.

A version is the state after a number of steps. Servers save parameters and optimizer state (docs/checkpoints.md). The
rest (buffers, schedulers, hyperparameters, what other optimizers update) is with the workers, who copy it at the same
steps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon import _core
from poseidon.adapter.arrays import StateArrays
from poseidon.adapter.membership import Membership
from poseidon.adapter.snapshots import Snapshots, copied, tell
from poseidon.adapter.state_text import broadcast, decode
from poseidon.adapter.training_state import RandomStreams, TrainingState
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.options import Settings
from poseidon.restore import restore

_NEWEST = 4  # that stay, of each interval
_DOUBLINGS = 6  # of the interval, by servers whose disk is slow


def worth_keeping(steps: Collection[int], every: int) -> set[int]:
    """The steps, of the given ones, that servers may have as their newest complete version; and the start."""
    newest_first = sorted(steps, reverse=True)
    kept = {0, *newest_first[:_NEWEST]}
    for doubling in range(_DOUBLINGS + 1):
        kept.update([step for step in newest_first if step % (every << doubling) == 0][:_NEWEST])
    return kept.intersection(steps)


class _Files(Snapshots):
    """Rank 0's files, on the disk of the servers' files."""

    def __init__(self, settings: Settings, arrays: StateArrays) -> None:
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", settings.job)[:80]
        tenant = hashlib.blake2b(settings.job.encode(), key="\n".join(settings.secrets).encode()[:64], digest_size=8)
        super().__init__(Path(settings.checkpoint_dir) / f"{readable}-{tenant.hexdigest()}.workers", _NEWEST, arrays)
        self._every = settings.checkpoint_every

    def _kept(self, steps: Sequence[int]) -> Collection[int]:
        return worth_keeping(steps, self._every)


@dataclass
class _Copy:
    """A worker's part of one version."""

    text: str
    arrays: list[Any]
    streams: RandomStreams | None  # None: every attempt seeds them

    def state(self, arrays: StateArrays) -> dict[str, Any]:
        """A copy of the state to load, because the objects take over its arrays."""
        return decode(self.text, [arrays.copy(array) for array in self.arrays], arrays)  # type: ignore[no-any-return]


class Versions:
    """The workers' part of the versions to which the job can go back. Use it from the thread that trains.

    After a failure all ranks go back to the newest version that both the servers and some worker have, in memory or on
    rank 0's disk. If there is none, they go back to the start, which is on the disk as a whole. The steps since then
    are made again.
    """

    def __init__(self, state: TrainingState, settings: Settings) -> None:
        self._state = state
        self._every = settings.checkpoint_every
        self._files = _Files(settings, state.arrays)
        self._held: dict[int, _Copy] = {}
        self._first_streams: RandomStreams | None = None  # at the start, which is not held; None as in `_Copy`

    def take(self, step: int, finished: int, writes: bool) -> None:
        """Begins an attempt at this step: copies the workers' part, if servers save a version of it.

        With `writes` it also writes the copy to the disk.
        """
        if step == 0 and self._first_streams is None:
            self._first_streams = self._state.streams()
        if step == 0 or step % self._every or step in self._held:
            return
        self._state.settle()
        state = {"step": step, "finished": finished, **self._state.collect(step, whole=False)}
        self._hold(step, state)
        if writes:
            self._write(step)

    def _write(self, step: int) -> None:
        held = self._held[step]
        self._files.write_copy(step, held.text, held.arrays)

    def _hold(self, step: int, state: Any) -> None:
        self._held[step] = _Copy(*copied(state, self._state.arrays), self._state.streams())
        kept = worth_keeping(self._held, self._every)
        self._held = {step: held for step, held in self._held.items() if step in kept}

    def agree(self, here: Membership, all_new: bool) -> tuple[int, int]:
        """Makes servers and workers take one version. Returns step and `finished`. Collective, with connected models.

        `all_new` says that no process has trained before. Then, with nothing on the disk, training begins.
        """
        holders = self._holders(here)
        version, from_disk = 0, None
        if here.rank == 0:
            version, from_disk = self._restore_newest(here, holders, all_new)
            self._files.drop_after(version)
        (version,) = here.present_control.sum([version])
        self._held = {step: held for step, held in self._held.items() if step <= version}
        state = self._spread(here, version, holders, from_disk)
        self._state.connect_servers(restored=version > 0)
        if here.rank == 0 and version > 0 and version not in self._files.steps():
            self._write(version)  # whoever was rank 0 had not come to it
        return version, state["finished"]

    def _holders(self, here: Membership) -> dict[int, list[int]]:
        """The ranks that hold a copy, by version."""
        holders: dict[int, list[int]] = {}
        for rank, versions in enumerate(here.present_control.gather_lists(sorted(self._held))):
            for version in versions:
                holders.setdefault(version, []).append(rank)
        return holders

    def _restore_newest(
        self, here: Membership, holders: Mapping[int, Sequence[int]], all_new: bool
    ) -> tuple[int, dict[str, Any] | None]:
        """Makes the servers restore the newest version of which a worker has the part. On rank 0 only.

        Returns the version, and that part if only the disk has it. 0 is the start.
        """
        on_disk = self._files.steps()
        left = {*holders, *on_disk}
        wanted = self._state.restorable()
        limit = 0
        while version := restore(here.present_client, wanted, limit):
            if not left:
                raise InvalidArgument(
                    f"checkpoint_dir holds version {version} of this job, but not what workers keep beside it "
                    "(buffers, schedulers): take another directory or job name, or remove it"
                )
            if version in holders:
                return version, None
            if version in on_disk and (state := self._files.read(version)) is not None:
                return version, state
            limit = max((step for step in left if 0 < step < version), default=_core.NO_VERSION)
        if all_new and not left:
            state = {"step": 0, "finished": 0, **self._state.collect(0)}
            self._files.write(0, state)
            self._files.check_start()
            return 0, state
        state = self._files.read(0) if 0 in on_disk else None
        if state is None:
            raise PoseidonError(
                "there is no state to go back to: checkpoint_dir has neither the state at the start nor a version that "
                "both the servers and the workers have saved; end all workers and take another directory"
            )
        if any(left):
            tell(
                "the servers have saved no version that can be used, so training goes back to its start; give "
                "dedicated servers the workers' checkpoint_dir and checkpoint_every"
            )
        return 0, state

    def _spread(
        self, here: Membership, version: int, holders: Mapping[int, Sequence[int]], from_disk: Any
    ) -> dict[str, Any]:
        """Loads this rank's part of the version, or that of a rank that has it. Collective."""
        having = holders.get(version, [])
        held = self._held.get(version)
        state = from_disk if held is None else held.state(self._state.arrays)
        if len(having) < here.world_size:
            root = having[0] if having else 0
            received = broadcast(state if here.rank == root else None, here.present_control, root)
            if held is None:
                state = received
                if version > 0:
                    self._hold(version, state)
        self._state.load(state, version, whole=version == 0)
        streams = self._first_streams if version == 0 else None if held is None else held.streams
        if streams is not None:
            streams.put_back()
        return state
