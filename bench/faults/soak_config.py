"""What a soak runs: its processes, its faults and how long things may take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from poseidon.options.run_identity import VARIABLE as RUN_VARIABLE

WEIGHTS = {"kill": 6, "term": 3, "freeze": 1, "freeze-kill": 1, "usurp": 1}
ENDING = {"kill", "term"}
FROZEN_TIMEOUTS = 1.2  # how long a frozen process is, in timeouts
CHECKPOINT_EVERY = 10  # steps, of servers that update
SPARE_SECONDS = 60.0  # that no step may take, beyond what faults and timeouts explain


@dataclass(frozen=True)
class SoakConfig:
    """What to run. seconds: with faults; every: mean seconds between a recovery and the next fault.

    servers: that stand alone; 0: they are within the workers. children: workers of a DataLoader that each process has,
    and as many other children of a fork, which outlive it. run: the identity that a launcher gives to all processes;
    without one the members decide who takes a lost one's place.
    """

    seconds: float
    ranks: int = 4
    servers: int = 0
    on_failure: str = "rejoin"
    optimizer: str = "sgd"
    seed: int = 1
    timeout: float = 15.0
    every: float = 3.0
    pace: float = 0.02
    children: int = 0
    run: str = ""
    faults: tuple[str, ...] = tuple(WEIGHTS)

    @property
    def patience(self) -> float:
        """Seconds in which a step has to be committed, whatever happened: to freeze, notice, meet and go on."""
        return (FROZEN_TIMEOUTS + 2) * self.timeout + SPARE_SECONDS

    def arguments(self, steps_file: Path, pace: float) -> list[str]:
        """Of the workers."""
        training = ["train", "--seed", str(self.seed), "--optimizer", self.optimizer, "--pace", str(pace)]
        return [*training, "--children", str(self.children), "--steps-file", str(steps_file)]

    def options(self, on_failure: str, checkpoints: Path) -> dict[str, object]:
        """Of Poseidon."""
        options: dict[str, object] = {"on_failure": on_failure, "timeout": self.timeout}
        # The layers are small: by default all would travel in one group, and that in one chunk, to one server.
        options |= {"small_bytes": 1024, "chunk_bytes": 256}
        if self.optimizer == "server":
            options |= {"checkpoint_dir": str(checkpoints), "checkpoint_every": CHECKPOINT_EVERY}
        return options

    def variables(self) -> dict[str, str]:
        """What a launcher would add to the environment."""
        return {RUN_VARIABLE: self.run} if self.run else {}
