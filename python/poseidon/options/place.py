"""This worker's place in its job: from keywords, the launcher's variables, torch.distributed, mpirun or Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.options.slurm import mpi_place, slurm_place
from poseidon.options.sources import first_given
from poseidon.options.table import PLACE


@dataclass(frozen=True)
class World:
    """This process's place in a job that torch.distributed has formed before."""

    rank: int
    world_size: int
    master_addr: str = "127.0.0.1"
    master_port: int = 29500


def find_place(keywords: Mapping[str, Any], world: World | None) -> tuple[dict[str, Any], dict[str, str]]:
    """This worker's place in the job, and where each value came from. Raises InvalidArgument."""
    alone = world is None and not any(
        keywords.get(name) is not None or os.environ.get(name.upper()) for name in ("rank", "world_size")
    )
    mpi, slurm = (mpi_place(os.environ), slurm_place(os.environ)) if alone else ({}, {})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in PLACE:
        name = option.name
        values[name], sources[name] = first_given(
            option,
            ("keyword", name, keywords.get(name)),
            ("environment", option.variable, os.environ.get(option.variable) or None),
            ("torch.distributed", name, getattr(world, name, None)),
            # Within a Slurm job all processes of mpirun have the SLURM_PROCID of the script that started it.
            ("MPI", *mpi.get(name, (name, None))),
            ("Slurm", *slurm.get(name, (name, None))),
        )
    if world is not None:
        _check_world(values, sources, world)
    _check_place(values, sources)
    return values, sources


def _check_world(values: Mapping[str, Any], sources: Mapping[str, str], world: World) -> None:
    """Raises InvalidArgument where a keyword or variable contradicts torch.distributed."""
    for name, ours in (("rank", world.rank), ("world_size", world.world_size)):
        if values[name] != ours:
            giver = name if sources[name] == "keyword" else name.upper()
            raise InvalidArgument(
                f"{giver} is {values[name]} while torch.distributed is initialized as rank {world.rank} of "
                f"{world.world_size}: give both the same, or leave {giver} out"
            )


def _check_place(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raises InvalidArgument unless rank, world size and the master's address make sense together."""

    def missing(name: str) -> bool:
        return sources[name] == "default"

    rank, world_size = values["rank"], values["world_size"]
    start = "start the workers with torchrun, srun, mpirun or `poseidon run`"
    if missing("rank") != missing("world_size"):
        lacks, has = ("RANK", "WORLD_SIZE") if missing("rank") else ("WORLD_SIZE", "RANK")
        raise InvalidArgument(
            f"{lacks} is missing while {has} is {values[has.lower()]}: set both or neither, or {start}"
        )
    if rank >= world_size:
        raise InvalidArgument(
            f"RANK is {rank} while WORLD_SIZE is {world_size}: it must be from 0 to {world_size - 1}; {start}"
        )
    for name, meaning in (("master_addr", "the address of rank 0's machine"), ("master_port", "a free port there")):
        if world_size > 1 and missing(name):
            raise InvalidArgument(
                f"{name.upper()} is missing while WORLD_SIZE is {world_size}: set it to {meaning}, or {start}"
            )
    local_rank, local_world_size = values["local_rank"], values["local_world_size"]
    if not missing("local_world_size") and not local_rank < local_world_size <= world_size:
        raise InvalidArgument(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE is {local_world_size} and WORLD_SIZE is {world_size}: "
            f"they must satisfy LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE; {start}"
        )
