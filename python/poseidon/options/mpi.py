"""A worker's place in its job as `mpirun` tells it.

Open MPI: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; Hydra, of MPICH and Intel MPI: PMI_*.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from poseidon.options.slurm import Place, port_of

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
