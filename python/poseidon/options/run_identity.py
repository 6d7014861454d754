"""What identifies a run of a job: equal for all its processes, replacements included, and for no other run's.

The name of a job does not: each run of a program has the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from poseidon.options.slurm import JOBS

VARIABLE = "POSEIDON_RUN"
_NO_NAME = ("", "none")  # torchrun's own where it is given none


def fresh_run() -> dict[str, str]:
    """The variable that gives a run's workers an identity of their own."""
    return {VARIABLE: secrets.token_hex(8)}


def given_run(environment: Mapping[str, str]) -> str:
    """The identity that somebody has given the run on purpose; empty where nobody has."""
    run = environment.get(VARIABLE)
    return f"poseidon run {run}" if run else ""


def run_of(sources: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The run's identity; empty where no launcher gives one. `sources` says where the place in the job came from."""
    if run := given_run(environment):
        return run
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun {name}"  # whoever reaches the agent's store is of its run
    if name not in _NO_NAME:
        return f"torchrun {name}"
    # Within an allocation of Slurm, and below mpirun, other processes may have these variables, too.
    if sources["rank"] == "Slurm" and (job := environment.get("SLURM_JOB_ID")):
        step, restarts = (environment.get(name, "0") for name in ("SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
        return f"Slurm job {job}, step {step}, restart {restarts}"
    if sources["rank"] == "MPI":
        return next((f"mpirun {environment[name]}" for name in JOBS if environment.get(name)), "")
    return ""
