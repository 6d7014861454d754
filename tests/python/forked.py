"""Where the tests' processes come from: forked from one that has imported PyTorch, which takes seconds each time."""

from __future__ import annotations

import os
import runpy
import sys
from multiprocessing import get_context
from pathlib import Path

from waiting import end

FORK = get_context("forkserver")
FORK.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.optim",
        "torch.optim.lr_scheduler",
        "torch.testing",
        "numpy",
        "pytest",
        "hypothesis",
        "sklearn.datasets",
        "poseidon.torch",
        "poseidon._core",
    ]
)


def run_script(command: list[str], environments: list[dict[str, str]], folder: Path, timeout_s: float) -> list[str]:
    """What `python COMMAND` prints with each of these environments, all at once; one thread each.

    AssertionError with all of it if one fails or takes longer. `folder` is for the output.
    """
    files = [folder / f"output-{number}" for number in range(len(environments))]
    processes = [
        FORK.Process(target=_run_script, args=(command, environment, file))  # which may start some of its own
        for environment, file in zip(environments, files, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        codes = [process.exitcode for process in processes]
    finally:
        end(*processes)
    outputs = [file.read_text() if file.exists() else "" for file in files]
    assert codes == [0] * len(codes), f"{command} ended with {codes}:\n" + "\n".join(outputs)
    return outputs


def _run_script(command: list[str], environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    import torch

    torch.set_num_threads(1)
    sys.argv = command
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))  # which only a new interpreter reads
    sys.path[:0] = [os.path.dirname(command[0]), *more]
    runpy.run_path(command[0], run_name="__main__")
