"""What the workers on other machines get of this process's environment, and what the launcher adds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.errors import InvalidArgument
from poseidon.options import BY_NAME, fresh_run, fresh_secret, is_given, resolve_option, to_environment
from poseidon.options.secret import VARIABLE as SECRET_VARIABLE
from poseidon.options.secret import read

# Of libraries that people set up by variables. Others are each machine's own.
_PREFIXES = (
    *("POSEIDON_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "CUBLAS_", "CUDNN_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "WANDB_", "MLFLOW_", "TF_", "KERAS_", "JAX_", "XLA_"),
)
_NAMES = ("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "CUDA_LAUNCH_BLOCKING")
_OF_NETWORK = ("tls", "timeout", "interfaces")
# Of another launcher, which says where this process is.
_NEVER = "TORCHELASTIC_"


def forwarded(environment: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The part that all machines get. `more`: NAME or NAME=VALUE. Raises InvalidArgument for a NAME that is not set."""
    found = {
        name: value
        for name, value in environment.items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and not name.startswith(_NEVER)
    }
    for text in more:
        name, equals, value = text.partition("=")
        if not name or not (equals or name in environment):
            raise InvalidArgument(
                f"--env {text}: this variable is not set here; set it, or write {name or 'NAME'}=VALUE"
            )
        found[name] = value if equals else environment[name]
    return found


def job_variables(options: Mapping[str, object], more: Sequence[str]) -> dict[str, str]:
    """What all workers have in common but their place: options, secret and identity. Raises InvalidArgument."""
    own = to_environment(options)
    shared = {**forwarded(os.environ, more), **own}
    file = BY_NAME["secret_file"].variable
    if file in own:  # which beats a secret that was there before
        shared.pop(SECRET_VARIABLE, None)
    if is_given("secret_file", shared) and not shared.get(SECRET_VARIABLE):
        shared[SECRET_VARIABLE] = read(str(resolve_option("secret_file", shared)))[0]  # it lies on this machine
    shared.pop(file, None)
    shared.update(fresh_secret(shared))
    shared.update(fresh_run())
    shared.setdefault("PYTHONUNBUFFERED", "1")
    return shared


def variables_before(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a job that only looks at the network: how to use it, the secret, and nothing of training."""
    secret = {SECRET_VARIABLE: variables[SECRET_VARIABLE]} if SECRET_VARIABLE in variables else {}
    given = {name: resolve_option(name, variables) for name in _OF_NETWORK if is_given(name, variables)}
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return {**to_environment(texts), **secret, **fresh_run()}


@dataclass(frozen=True)
class Place:
    """Where a worker is among all, and among the `local_count` of its machine, which has so many processor `cores`."""

    rank: int
    world_size: int
    local_rank: int
    local_count: int
    machine: int
    cores: int

    def variables(self, master: tuple[str, int]) -> dict[str, str]:
        """`master`: address and port of rank 0."""
        return {
            "MASTER_ADDR": master[0],
            "MASTER_PORT": str(master[1]),
            "WORLD_SIZE": str(self.world_size),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_count),
            "GROUP_RANK": str(self.machine),
            "OMP_NUM_THREADS": str(max(1, self.cores // self.local_count)),
        }


def places(local_counts: Sequence[int], cores: Sequence[int], world_size: int | None = None) -> list[Place]:
    """Those of all workers. `local_counts` and `cores`: of each machine, in the order of ranks."""
    found: list[Place] = []
    for machine, (count, own_cores) in enumerate(zip(local_counts, cores, strict=True)):
        found += [
            Place(len(found) + local, world_size or sum(local_counts), local, count, machine, own_cores)
            for local in range(count)
        ]
    return found


def worker_variables(place: Mapping[str, str], shared: Mapping[str, str]) -> dict[str, str]:
    """A worker's place, which nothing changes, and what all share. The number of threads may be the user's."""
    return {**place, **shared, **{name: value for name, value in place.items() if name != "OMP_NUM_THREADS"}}


def replica_variables(
    meeting: tuple[str, int], ports: Sequence[int], cores: Sequence[int], count: int
) -> list[dict[str, str]]:
    """Those of all workers where each machine is one replica of a sharded model, and a world of its own.

    `meeting`: where the replicas' first shards meet; the others do at the ports after it. `ports`: of each machine's
    own rendezvous. `count`: of workers of a machine.
    """
    host = f"[{meeting[0]}]" if ":" in meeting[0] else meeting[0]
    option = BY_NAME["replica"].variable
    return [
        {**place.variables(("127.0.0.1", port)), option: f"{replica}/{len(ports)}@{host}:{meeting[1]}"}
        for replica, (port, own_cores) in enumerate(zip(ports, cores, strict=True))
        for place in places([count], [own_cores])
    ]
