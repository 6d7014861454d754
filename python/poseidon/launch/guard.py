"""Ends what is left of a run whose launcher was killed: what the workers have started, and the run's folder.

The kernel ends the workers themselves. This file is also a program, which waits for the launcher's end in a session of
its own, so that no signal to the launcher's group reaches it. It starts quickly, as it imports nothing of Poseidon.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

_STARTED, _REAPED, _OVER = b"started", b"reaped", b"over"


class Guard:
    """The launcher's end of the pipe to that program. A run goes on without it where it cannot be started."""

    def __init__(self, folder: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Of that program."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """The run is over."""
        self._tell(_OVER)
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def started(self, group: int) -> None:
        """A worker leads this process group now."""
        self._tell(_STARTED, group)

    def reaped(self, group: int) -> None:
        """Its group has been ended, and the number may be another's soon."""
        self._tell(_REAPED, group)

    def _tell(self, word: bytes, group: int = 0) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"%s %d\n" % (word, group))
                self._process.stdin.flush()


def _watch(words: IO[bytes], folder: str) -> None:
    groups = set()
    for line in words:
        word, _, group = line.partition(b" ")
        if word == _OVER:
            return
        if word == _STARTED:
            groups.add(int(group))
        else:
            groups.discard(int(group))
    for number in groups:
        with contextlib.suppress(OSError):
            os.killpg(number, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _watch(sys.stdin.buffer, sys.argv[1])
