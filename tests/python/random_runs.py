"""Runs random jobs of a framework on several workers. `bench/random_jobs.py` and the tests use it.

A generator is a module with `make(seed)`, what the job of a seed is, as a dataclass; `options(seed)`, what init() gets;
and `run_job(seed)`, which trains on every rank, raises where that differs from one process, and returns a digest that
is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import workers

_TIMEOUT_S = 240.0  # on a machine with much else to do; the jobs' own timeout is shorter
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class Framework:
    """Where its jobs come from, and what its workers are."""

    generator: str
    adapter: str
    environment: Mapping[str, str] = field(default_factory=lambda: _ONE_THREAD)


FRAMEWORKS = {
    "torch": Framework("random_training.py", workers.TORCH),
    "jax": Framework(
        "random_jax.py",
        "poseidon.jax",
        {
            **_ONE_THREAD,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
        },
    ),
    "tensorflow": Framework(
        "random_tensorflow.py",
        "poseidon.tensorflow",
        {**_ONE_THREAD, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1"},
    ),
    "arrays": Framework("random_arrays.py", "random_arrays"),
}


class RandomJobs:
    """The random jobs of one framework, which the same `ranks` processes train one after the other."""

    def __init__(self, name: str, ranks: int = 2) -> None:
        framework = FRAMEWORKS[name]
        self._name, self._ranks = name, ranks
        self._generator: Any = import_module(Path(framework.generator).stem)
        self._crew = (
            workers.CREW if name == "torch" else workers.Crew(framework.adapter, _TIMEOUT_S, **framework.environment)
        )

    def failures(self, seeds: Iterable[int]) -> list[str]:
        """What is wrong with the jobs of these seeds."""
        return [text for text in map(self.failure_of, seeds) if text is not None]

    def close(self) -> None:
        """Ends the processes."""
        self._crew.close()

    def failure_of(self, seed: int) -> str | None:
        """What is wrong with the job of this seed, with the command that repeats it alone; None: nothing."""
        try:
            digests = self._crew.run(self._ranks, self._generator.run_job, seed, **self._generator.options(seed))
        except workers.WorkerError as error:
            text = str(error)
        else:
            if len(set(digests)) == 1:
                return None
            text = "the workers have different parameters"
        command = f"python bench/random_jobs.py --framework {self._name} --ranks {self._ranks} --jobs 1 --seed {seed}"
        job, options = asdict(self._generator.make(seed)), self._generator.options(seed)
        return f"seed {seed}: {job}, options {options}\n{text}\nalone: {command}"
