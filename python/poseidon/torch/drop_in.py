"""Runs a program that is written for torch.distributed with Poseidon, without a changed line.

    torchrun --nproc-per-node 4 -m poseidon.torch.drop_in train.py --epochs 3
    poseidon run -n 4 --drop-in train.py --epochs 3

`-m MODULE` in place of the script runs a module. Options are POSEIDON_* variables or lines of poseidon.toml.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence

from poseidon.errors import PoseidonError
from poseidon.options import resolve
from poseidon.torch.backend.hsdp import exchange_replicas
from poseidon.torch.replace import replace_ddp

_USAGE = "usage: python -m poseidon.torch.drop_in SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]"


def main(arguments: Sequence[str]) -> None:
    """Runs the script, or with -m the module, as `__main__` with the arguments that follow it."""
    as_module, program = arguments[:1] == ["-m"], list(arguments)
    if as_module:
        program = program[1:]
    if not program or program[0].startswith("-"):
        sys.exit(_USAGE)
    if not as_module and not os.path.exists(program[0]):
        sys.exit(f"poseidon: there is no script {program[0]}: give its path, or the name of a module with -m")
    replace_ddp()
    with contextlib.suppress(ImportError):
        exchange_replicas()
    _announce()
    sys.argv = program
    if as_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    runpy.run_path(program[0], run_name="__main__")


def _announce() -> None:
    try:
        rank = resolve().rank
    except PoseidonError as error:  # each worker would say so where it joins; here it is one line
        sys.exit(f"poseidon: {error}")
    if rank == 0:
        print(
            "poseidon: drop-in: torch.nn.parallel.DistributedDataParallel is poseidon.torch's in this program",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
