"""A collective of the backend that is under way, as torch.distributed knows it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from poseidon.errors import PoseidonTimeout
from poseidon.torch.backend.arrays import Finish
from poseidon.torch.backend.home import Home
from poseidon.torch.tensors.devices import Submitted, is_accelerator

_NO_TIMEOUT = timedelta(0)


class Work(TorchWork):
    """One call of a group, or several that are waited for together.

    Any thread may wait for it. The first that finds it complete copies results to where they belong. A later wait gets
    the same error, if there was one. With tensors on a device the wait is the current stream's, as with torch's own
    backends for devices.
    """

    def __init__(
        self,
        home: Home,
        calls: Sequence[int],
        outputs: Sequence[torch.Tensor],
        finish: Sequence[Finish] = (),
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self._home = home
        self._calls = list(calls)
        self._outputs = list(outputs)
        self._finish = list(finish)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ended = False
        self._error: BaseException | None = None
        self._source = 0
        self._written: list[Submitted] = []  # what writes outputs on devices
        self._future_lock = threading.Lock()
        self._future: Any = None

    @classmethod
    def of(cls, works: Sequence[Work], home: Home, timeout_s: float | None) -> Work:
        """One work that is over when all of these are, which nobody waits for any more."""
        calls = [call for work in works for call in work._calls]
        outputs = [tensor for work in works for tensor in work._outputs]
        finish = [one for work in works for one in work._finish]
        return cls(home, calls, outputs, finish, timeout_s)

    def set_limit(self, seconds: float) -> None:
        """A wait without a timeout of its own takes no longer."""
        self._timeout_s = seconds

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Waits until the results are here. Raises the error of the call, or PoseidonTimeout after `timeout`."""
        limit_s = timeout.total_seconds() or self._timeout_s
        with self._lock:
            if not self._ended:
                self._end(limit_s)
        if self._error is not None:
            raise self._error
        for submitted in self._written:
            submitted.order()
        return True

    def wait_for_devices(self) -> None:
        """Waits until results are where they belong on devices, too."""
        self.wait()
        for submitted in self._written:
            submitted.wait()

    def _end(self, limit_s: float | None) -> None:
        try:
            while self._calls:
                self._wait_for(self._calls[0], limit_s)
                self._calls.pop(0)
            for finish in self._finish:
                finish()
            devices = {tensor.device for tensor in self._outputs if is_accelerator(tensor.device)}
            self._written = [Submitted(device) for device in devices]
        except PoseidonTimeout as error:
            if self._calls and not self._home.collectives.done(self._calls[0]):
                raise  # it goes on
            self._error = error
        except Exception as error:
            self._error = error
        self._ended = True
        self._finish = []

    def _wait_for(self, call: int, limit_s: float | None) -> None:
        with self._home.telling():
            source = self._home.collectives.wait(call, limit_s)
        if source is None:
            raise PoseidonTimeout(
                f"{self._home.calls.describe(call)}, has not completed within its timeout of {limit_s} s; see whether "
                "the other ranks call it"
            )
        self._source = source
        self._home.calls.end(call)

    def is_completed(self) -> bool:
        """Whether the results are where they belong, or it has failed. Does not wait."""
        if self._ended or not all(self._home.collectives.done(call) for call in list(self._calls)):
            return self._ended
        if self._lock.acquire(blocking=False):  # otherwise another thread waits for it
            try:
                if not self._ended:
                    self._end(None)
            finally:
                self._lock.release()
        return self._ended

    def is_success(self) -> bool:
        """Whether it has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error, once it has completed."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call has written."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def source_rank(self) -> int:
        """Of a receive from any rank: the sender's rank in the group."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the tensors, which a thread of the backend completes."""
        with self._future_lock:
            if self._future is None:
                self._future = torch.futures.Future()
                _completer.complete(self, self._future)
            return self._future

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The tensors that the call writes, whether it has or not."""
        return self._outputs


class _Completer:
    """Threads that wait for works whose futures somebody wants: as many as there are such works at once.

    What runs when a future completes may itself wait for another future, so no work waits for another one's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[tuple[Work, Any]]] = []
        self._process = os.getpid()

    def complete(self, work: Work, future: Any) -> None:
        """Completes the future when the work is over."""
        with self._lock:
            if self._process != os.getpid():  # a forked child has lost the threads
                self._idle, self._process = [], os.getpid()
            tasks = self._idle.pop() if self._idle else self._new_thread()
        tasks.put((work, future))

    def _new_thread(self) -> queue.SimpleQueue[tuple[Work, Any]]:
        tasks: queue.SimpleQueue[tuple[Work, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(tasks,), name="poseidon works", daemon=True).start()
        return tasks

    def _run(self, tasks: queue.SimpleQueue[tuple[Work, Any]]) -> None:
        while True:
            work, future = tasks.get()
            try:
                work.wait_for_devices()  # nothing orders this thread's streams before those of who takes the result
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(work.outputs)
            del work, future
            with self._lock:
                self._idle.append(tasks)


_completer = _Completer()
