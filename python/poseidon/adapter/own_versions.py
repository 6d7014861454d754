"""Versions of a training in which every rank has a state of its own: each rank saves its own, at the same steps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.adapter.snapshots import Snapshots
from poseidon.adapter.training_state import OwnState
from poseidon.errors import InvalidArgument, PoseidonError

_LEAST_KEPT = 2
_FOLDER = "rank-{:05}-of-{}"
_FOLDER_NAME = re.compile(r"rank-\d{5}-of-(\d{1,9})")


class OwnVersions:
    """The files of one rank, and the version of which all ranks have one. Use it from the thread that trains.

    A version is saved when the ranks have just exchanged, first after each `every` steps. Before they exchange again
    each waits until its version is on the disk. So if a rank has a version, all ranks have at least the one before it.
    """

    def __init__(self, state: OwnState, directory: str | os.PathLike[str], every: int, keep: int) -> None:
        if keep < _LEAST_KEPT:
            raise InvalidArgument(
                f"keep is {keep}: a worker that is lost while it writes a version goes back to the one before, so keep "
                "2 or more"
            )
        self._state = state
        self._directory = Path(directory)
        self._every, self._keep = every, keep
        self._files: Snapshots | None = None
        self._is_alone = False
        self._last = 0  # the step of the newest version
        self._exchanged = True  # something with all other ranks since the newest version was saved

    def take(self, step: int, finished: int, whole: bool) -> None:
        """Begins an attempt at this step: saves a version, if one is due. `whole`: with what servers hold."""
        due = step // self._every > self._last // self._every
        if due and self._exchanged and self._state.has_exchanged():
            self._write(step, finished, whole)

    def complete(self, step: int, here: Membership) -> None:
        """Saves the state at the beginning of this step, behind which no rank is to go back any more. Collective."""
        if step > self._last:
            if here.control is not None:
                here.control.barrier()  # all have the version before this one
            self._write(step, step, here.rank == 0)
            self._finish()

    def _write(self, step: int, finished: int, whole: bool) -> None:
        assert self._files is not None
        self._files.write(step, {"step": step, "finished": finished, **self._state.collect(step, whole)})
        self._last, self._exchanged = step, self._is_alone

    def _finish(self) -> None:
        if self._files is not None:
            self._files.finish()

    def _before_exchange(self) -> None:
        self._finish()
        self._exchanged = True

    def agree(self, here: Membership, all_new: bool) -> tuple[int, int]:
        """Loads the newest version that all ranks have. Returns its step and `finished`. Collective.

        `all_new` says that no process has trained before. Then, with nothing on the disk, training begins.
        """
        control = here.control
        self._is_alone = control is None
        self._finish()
        self._files = Snapshots(
            self._directory / _FOLDER.format(here.rank, here.world_size), self._keep, self._state.arrays
        )
        step, state = self._newest_common(control, self._files)
        if control is not None:
            control.on_exchange = self._before_exchange
        if state is None:
            self._refuse_versions_of_others(here)
            self._begin(control, all_new)
            return 0, 0
        # Of steps that are now made again. Nobody may find them later beside what others make of these steps.
        self._files.drop_after(step)
        self._state.load(state, step)
        self._last = step
        return step, state["finished"]

    def _newest_common(self, control: Control | None, files: Snapshots) -> tuple[int, Any]:
        """The newest version that every rank has and can read: its step and this rank's state; None if there is none.

        Raises InvalidArgument if only some ranks have versions.
        """
        own = files.steps()
        while True:
            rows = [own] if control is None else control.gather_lists(own)
            common = set(rows[0]).intersection(*rows[1:])
            if not common:
                lacking = [rank for rank, row in enumerate(rows) if not row]
                if any(rows) and lacking:
                    raise InvalidArgument(
                        f"rank {lacking[0]} finds no version of its own in the directory of Recovery, and others do: "
                        "give a rank the same files when it is started again, or start all with an empty directory"
                    )
                return 0, None
            step = max(common)
            state = files.read(step)
            reading = int(state is not None)
            if (reading if control is None else control.sum([reading])[0]) == len(rows):
                return step, state
            own = [number for number in own if number < step]

    def _refuse_versions_of_others(self, here: Membership) -> None:
        """Raises InvalidArgument on all ranks if one finds what another number of workers has saved. Collective.

        Their states cannot be dealt out to other ranks, and to begin anew would throw that training away unseen.
        """
        found = [int(match[1]) for path in self._directory.iterdir() if (match := _folder_of_rank(path))]
        own = max((count for count in found if count != here.world_size), default=0)
        theirs = max(own if here.control is None else max(row[0] for row in here.control.one_hot([own])), 0)
        if theirs:
            raise InvalidArgument(
                f"the directory of Recovery has the states of {theirs} workers, and this job has {here.world_size}: "
                f"with LocalSGD each worker has its own, so start {theirs} workers; or save the model there and begin "
                "with it and an empty directory"
            )

    def _begin(self, control: Control | None, all_new: bool) -> None:
        if not all_new:
            raise PoseidonError(
                "there is no version that all ranks have saved: look for messages about snapshots above; end all "
                "workers and start them with another directory"
            )
        self._state.start()
        self._write(0, 0, whole=True)
        assert self._files is not None
        self._files.check_start()
        if control is not None:
            control.barrier()  # afterwards there always is a version of all ranks


def _folder_of_rank(path: Path) -> re.Match[str] | None:
    """The match of a rank's folder that has versions."""
    match = _FOLDER_NAME.fullmatch(path.name)
    return match if match and path.is_dir() and any(path.glob("*.snapshot")) else None
