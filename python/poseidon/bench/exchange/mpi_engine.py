"""MPI_Allreduce by MPICH as a peer, over TCP.

MPICH is called through ctypes, so that nothing is compiled against it.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil

from poseidon.bench.exchange.engine import Engine
from poseidon.errors import PoseidonError

MPI_LAUNCHER = "mpiexec.hydra"
# Values of the common binary interface of MPICH and its descendants.
_COMM_WORLD, _FLOAT, _SUM, _IN_PLACE = 0x44000000, 0x4C00040A, 0x58000003, -1


def _library() -> str | None:
    return ctypes.util.find_library("mpich")


def missing_mpi() -> str | None:
    """Says why MPI cannot be measured here. Returns None if it can."""
    if shutil.which(MPI_LAUNCHER) is None or _library() is None:
        return f"MPICH is not installed ({MPI_LAUNCHER} and libmpich; on Debian: apt-get install mpich)"
    return None


class MpiEngine(Engine):
    """Calls MPI_Allreduce on all arrays as one buffer. Works only in a process that MPICH's launcher started."""

    def connect(self) -> None:
        self._mpi = ctypes.CDLL(_library())
        self._call(self._mpi.MPI_Init(None, None))

    def step(self) -> None:
        flat = self._arrays.flat
        place, buffer = ctypes.c_void_p(_IN_PLACE), ctypes.c_void_p(flat.ctypes.data)
        self._call(self._mpi.MPI_Allreduce(place, buffer, flat.size, _FLOAT, _SUM, _COMM_WORLD))

    def close(self) -> None:
        self._call(self._mpi.MPI_Finalize())

    @staticmethod
    def _call(code: int) -> None:
        if code != 0:
            raise PoseidonError(f"MPI failed with error class {code}")
