"""Every launcher starts a job that trains to the same parameters: the real programs, on this machine alone.

docs/launchers.md shows what they do; Ray's program there is that of programs/ray_train.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from poseidon.launch import free_port
from poseidon.options import PLACE
from runs import POSEIDON_RUN, PROGRAMS, RANKS, TIMEOUT_S, TORCHRUN, environment, skip_without
from slurm_cluster import missing, slurm_cluster

ROOT = Path(__file__).parents[2]
LAUNCHED = [sys.executable, str(PROGRAMS / "launched.py")]


def launch(command: list[str], folder: Path, extra: dict[str, str] | None = None, ranks: int = RANKS) -> list[Any]:
    """What each rank of `launched.py` has saved. AssertionError with what was printed if the command fails."""
    variables = {name: value for name, value in environment().items() if not name.startswith(("MASTER_", "LOCAL_"))}
    done = subprocess.run(
        command, env={**variables, **(extra or {})}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def assert_trained(found: list[Any], expected: list[Any], source: str, local_size: int = RANKS) -> None:
    """All ranks have the bits that those of `poseidon run` have, and know their place."""
    for rank, (state, other) in enumerate(zip(found, expected, strict=True)):
        assert state["source"] == source
        assert (state["world_size"], state["local_world_size"]) == (len(expected), local_size)
        assert state["local_rank"] == rank % local_size
        for name, tensor in other["model"].items():
            assert torch.equal(state["model"][name], tensor), name


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("poseidon-run")
    return launch([sys.executable, *POSEIDON_RUN, LAUNCHED[1], str(folder)], folder)


def test_torchrun(tmp_path: Path, expected: list[Any]) -> None:
    found = launch([sys.executable, *TORCHRUN, LAUNCHED[1], str(tmp_path)], tmp_path)
    assert_trained(found, expected, "environment")


@pytest.mark.parametrize(
    ("program", "options", "package"),
    [("mpirun.openmpi", ["--oversubscribe", "--allow-run-as-root"], "openmpi-bin"), ("mpirun.mpich", [], "mpich")],
)
def test_mpirun(program: str, options: list[str], package: str, tmp_path: Path, expected: list[Any]) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install {package}")
    extra = {"MASTER_PORT": str(free_port())} if package == "mpich" else {}  # Hydra tells nothing to make one from
    found = launch([program, *options, "-np", str(RANKS), *LAUNCHED, str(tmp_path)], tmp_path, extra)
    assert_trained(found, expected, "MPI")


def test_srun(tmp_path: Path, expected: list[Any]) -> None:
    if missing() or os.geteuid() != 0:
        pytest.skip("a Slurm of this machine needs root and: apt-get install slurm-wlm munge")
    four = tmp_path / "four"
    for name in ("slurm", "four"):
        (tmp_path / name).mkdir()
    of_four = launch([sys.executable, *POSEIDON_RUN[:-1], "4", LAUNCHED[1], str(four)], four, ranks=4)
    with slurm_cluster(tmp_path / "slurm") as variables:
        found = launch(["srun", "-N", "1", "-n", "2", *LAUNCHED, str(tmp_path)], tmp_path, variables)
        assert_trained(found, expected, "Slurm")
        shutil.rmtree(four)
        four.mkdir()
        found = launch(["srun", "-N", "2", "-n", "4", *LAUNCHED, str(four)], four, variables, ranks=4)
        assert_trained(found, of_four, "Slurm", local_size=2)


def test_ray_train(tmp_path: Path, expected: list[Any]) -> None:
    skip_without("ray")
    extra = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    found = launch([sys.executable, str(PROGRAMS / "ray_train.py"), str(tmp_path)], tmp_path, extra)
    assert_trained(found, expected, "environment")


# Kubernetes: the manifests against the models that Kubeflow publishes of its own API, of JobSet and of Kubernetes.


def manifest(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make test-frameworks")
    loaded = yaml.safe_load((ROOT / "deploy" / "kubernetes" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def assert_valid(given: dict[str, Any], model: Any) -> None:
    """Every field is known, and has the right type: what the model makes of it is what was given."""
    assert model.from_dict(given).to_dict() == given


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def test_the_jobset_is_valid_and_tells_each_pod_its_place() -> None:
    skip_without("kubeflow_trainer_api")
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    jobset = manifest("jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert_valid(jobset, JobsetV1alpha2JobSet)
    with pytest.raises((AssertionError, ValueError)):
        assert_valid({**jobset, "spec": {**jobset["spec"], "replicatedJob": []}}, JobsetV1alpha2JobSet)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    given = variables(container)
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= {option.variable for option in PLACE} & set(given)
    assert int(given["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    name = jobset["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"


def test_the_trainjob_is_valid() -> None:
    skip_without("kubeflow_trainer_api")
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    job = manifest("trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert_valid(job, TrainerV1alpha1TrainJob)
    with pytest.raises((AssertionError, ValueError)):
        assert_valid({**job, "spec": {**job["spec"], "trainer": {"numNodes": "four"}}}, TrainerV1alpha1TrainJob)


def test_the_image_for_workers_can_be_named() -> None:
    stages = re.findall(r"^FROM \S+(?: AS (\w+))?$", (ROOT / "deploy" / "Containerfile").read_text(), re.MULTILINE)
    assert "worker" in stages
    assert stages[-1] == ""  # what is built without --target: the server
