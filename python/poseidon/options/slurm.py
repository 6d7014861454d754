"""A worker's place in its job as a launcher tells it.

Slurm's `srun`: https://slurm.schedmd.com/srun.html, output environment. `mpirun` of Open MPI:
https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; Hydra, of MPICH and Intel MPI: PMI_*.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from poseidon.errors import InvalidArgument

# The variables of rank, world size, local rank and local world size.
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OPTIONS = ("rank", "world_size", "local_rank", "local_world_size")

# What differs between two jobs of one machine.
JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")


def mpi_place(environment: Mapping[str, str]) -> Place:
    """Name of an option to the variable that says it and its value; empty where mpirun did not start this process.

    MPI does not say where rank 0 is. On one machine this is known all the same.
    """
    for variables in (_OPEN_MPI, _HYDRA):
        if all(environment.get(variable) for variable in variables):
            break
    else:
        return {}
    place: Place = {
        option: (variable, environment[variable]) for option, variable in zip(_OPTIONS, variables, strict=True)
    }
    if place["world_size"][1] == place["local_world_size"][1]:
        place["master_addr"] = (variables[3], "127.0.0.1")
        for variable in JOBS:
            if job := environment.get(variable):
                place["master_port"] = (variable, port_of(zlib.crc32(job.encode())))
                break
    return place


# Below the ports that Linux gives to outgoing connections.
_FIRST_PORT, _PORT_COUNT = 15000, 15000
_STEPS_APART = 61  # steps of one job that run at once do not share a port, nor do jobs that were started together

# Numbers of steps from here on are those of a batch script or a shell, which srun has not started.
_FIRST_OTHER_STEP = 4294967290

Place = dict[str, tuple[str, str]]


def slurm_place(environment: Mapping[str, str]) -> Place:
    """Name of an option to the variable that says it and its value; empty where srun did not start this process.

    Raises InvalidArgument for a list of hosts or tasks that cannot be read.
    """
    if not environment.get("SLURM_PROCID") or not environment.get("SLURM_NTASKS"):
        return {}
    place: Place = {
        "rank": ("SLURM_PROCID", environment["SLURM_PROCID"]),
        "world_size": ("SLURM_NTASKS", environment["SLURM_NTASKS"]),
    }
    if local_rank := environment.get("SLURM_LOCALID"):
        place["local_rank"] = ("SLURM_LOCALID", local_rank)
    if tasks := _tasks_of_node(environment):
        variable, count = tasks
        # That of the whole job, where a step has fewer.
        if count.isdigit() and environment["SLURM_NTASKS"].isdigit():
            count = str(min(int(count), int(environment["SLURM_NTASKS"])))
        place["local_world_size"] = (variable, count)
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if hosts := environment.get(variable):
            place["master_addr"] = (variable, _first_host(hosts, variable))
            break
    if job := environment.get("SLURM_JOB_ID"):
        place["master_port"] = ("SLURM_JOB_ID", _port(job, environment.get("SLURM_STEP_ID", "0")))
    return place


def refuse_without_srun(sources: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raises InvalidArgument in a batch script or allocation for several tasks where srun did not start this process.

    Nobody starts the other ranks there. `sources` says where the place in the job came from.
    """
    hint = hint_of_srun(sources, environment)
    step = environment.get("SLURM_STEP_ID", "")
    by_another = step.isdigit() or environment.get("ENVIRONMENT") == "BATCH" or not environment.get("SLURM_PROCID")
    if hint and by_another:
        raise InvalidArgument(hint)


def hint_of_srun(sources: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """What to do where srun has not started this process, as far as one can tell; empty where it has."""
    tasks, step = environment.get("SLURM_NTASKS", ""), environment.get("SLURM_STEP_ID", "")
    by_srun = (step.isdigit() and int(step) < _FIRST_OTHER_STEP) or environment.get("SLURM_PROCID", "0") != "0"
    several = environment.get("SLURM_JOB_ID") and tasks.isdigit() and int(tasks) > 1
    if not several or by_srun or sources.get("rank") not in ("Slurm", "default"):
        return ""
    return (
        f"SLURM_NTASKS is {tasks}, and srun did not start this process, so nobody starts the other workers: start the "
        "script with srun, as in srun python train.py; or set RANK=0 and WORLD_SIZE=1 to train with one worker"
    )


def _first_host(hosts: str, variable: str) -> str:
    """The first of a list such as "node[01-03,07],login": "node01"."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    name = re.sub(r"\[\s*(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.:-]+", name):
        raise InvalidArgument(
            f"{variable} is {hosts!r}, whose first host cannot be read: set MASTER_ADDR to the address of rank 0's "
            "machine"
        )
    return name


def _tasks_of_node(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """How many workers there are on this machine, and which variable says so; None: none does."""
    for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if text := environment.get(variable):
            counts = _task_counts(text, variable)
            node = environment.get("SLURM_NODEID", "0")
            if node.isdigit() and int(node) < len(counts):
                return variable, str(counts[int(node)])
    per_node = environment.get("SLURM_NTASKS_PER_NODE")
    return ("SLURM_NTASKS_PER_NODE", per_node) if per_node else None


def _task_counts(text: str, variable: str) -> list[int]:
    """ "4(x2),3" is [4, 4, 3]: of each machine in turn."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InvalidArgument(
                f"{variable} is {text!r}, which is no list of tasks such as 4(x2),3: correct it or unset it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _port(job: str, step: str) -> str:
    """The same for all processes of a step."""
    numbers = [int(text) if text.isdigit() else 0 for text in (job, step)]
    return port_of(numbers[0] + _STEPS_APART * numbers[1])


def port_of(job: int) -> str:
    """The same for all processes that know the number."""
    return str(_FIRST_PORT + job % _PORT_COUNT)
