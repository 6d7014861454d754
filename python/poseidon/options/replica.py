"""The two jobs of a process that has a shard of one replica: with the rest of its replica, and with the same shard.

torch.distributed, or the launcher, describes the ranks of one replica. The option `replica` says which one of them that
is. So a replica that is lost takes no group of torch's with it that others need.
"""

from __future__ import annotations

import os
from dataclasses import replace

from poseidon.errors import InvalidArgument
from poseidon.options.defaults import BY_MACHINE
from poseidon.options.kinds import ReplicaPlace
from poseidon.options.run_identity import given_run
from poseidon.options.settings import Settings

_LONGEST_JOB = 64
_MOST_PORT = 65535


def within_replica(settings: Settings) -> Settings:
    """The settings of the job of one replica's ranks, which lives and fails as a whole."""
    place = ReplicaPlace.of(settings.replica)
    alone = settings.replace(
        job=_job(settings, f"replica{place.number}"),
        replica="",
        on_failure="abort",
        servers=(),
        checkpoint_dir="",
        record="",
    )
    # A rank may wait for a replacement of another replica as long as `timeout`, and the others of its own for that one.
    return replace(alone, sources={**settings.sources, "timeout": "default"})


def between_replicas(settings: Settings) -> Settings:
    """The settings of the job of the ranks that have this rank's shard, one for each replica.

    Each shard's first rank serves a store at a port of its own, from the given one on. InvalidArgument where there are
    not so many ports.
    """
    place, shard = ReplicaPlace.of(settings.replica), settings.rank
    if place.port + settings.world_size - 1 > _MOST_PORT:
        raise InvalidArgument(
            f"replica has port {place.port}, and {settings.world_size} ranks take one each from there on: give a lower "
            "one"
        )
    values = {**settings.values, "world_size": place.count * settings.world_size}
    for name, default in BY_MACHINE.items():
        if settings.sources.get(name) == "default":
            values[name] = default(values)
    values |= {
        "job": _job(settings, f"shard{shard}"),
        "rank": place.number,
        "world_size": place.count,
        "local_rank": 0,
        "local_world_size": 1,
        "master_addr": place.host,
        "master_port": place.port + shard,
    }
    # A launcher's name for its run is that of one replica's processes.
    return replace(settings, values=values, use_agent_store=False, run=given_run(os.environ))


def _job(settings: Settings, part: str) -> str:
    return f"{settings.job[: _LONGEST_JOB - len(part) - 1]}.{part}"
