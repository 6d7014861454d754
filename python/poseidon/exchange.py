"""Push, pull and the fused push_pull on arrays, without a framework (Parameter Hub §3.1).

    with poseidon.connect() as exchange:
        exchange.declare({"w": w})
        exchange.push_pull("w", gradient, out=w)

An *array* is any C-contiguous object in CPU memory that offers the buffer protocol or `__dlpack__`: of NumPy, PyTorch,
JAX, `array.array` and so on. Its dtype is float32, float64, float16, uint8, int32 or int64 in native byte order.
Nothing is copied: data is sent from and received into the array's own memory. Only a read-only array is copied once
before it is sent. A tensor of torch's that is a negative view (`is_neg()`) is refused.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from poseidon._core import Client, Layer, UpdateRule
from poseidon.adapter.failure_watch import FailureWatch
from poseidon.adapter.features import Features
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.store import shared_store
from poseidon.chunk_cache import settle_chunk_bytes
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown
from poseidon.notices import tell_notices
from poseidon.options import refuse_without_srun, resolve
from poseidon.restore import restore

Keys = str | Iterable[str] | Mapping[str, Any]  # one key, several, or keys with their arrays
Arrays = Any  # one array, a list or tuple of them, or a mapping from key to array

_DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int64")
_HOST_DEVICES = (1, 3, 11)  # DLPack's kDLCPU, kDLCUDAHost and kDLROCMHost
_NO_LAYER = 2**32 - 1  # waiting for it returns at once, or raises what ended the job


def connect(**options: Any) -> Exchange:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe and returns its exchange.

    `options` are those of `poseidon.options` and the place in the job (`rank`, `world_size`, …); a keyword
    beats the environment. Blocks until all ranks have come, up to `timeout`. With one worker and no
    `servers` everything stays in this process. Raises a PoseidonError that says who or what is missing.
    """
    _exchanges.watch()
    settings = resolve(**options)
    refuse_without_srun(settings.sources, os.environ)
    Features.of(settings, "exchange")
    client = Client.connect(settings.core(), None if settings.world_size == 1 else shared_store(settings))
    settle_chunk_bytes(client, settings)
    tell_notices(client)
    return Exchange(client, wire=settings.wire, parameter_wire=settings.parameter_wire)


@dataclass
class _Key:
    """A declared key. `newest` is the number of its newest operation; 0 if there was none."""

    name: str
    layer: int
    dtype: str
    shape: tuple[int, ...]
    newest: int = 0


_Operations = Sequence[tuple[int, int]]  # each is a layer, and the number of an operation on it
_Jobs = Sequence[tuple[_Key, tuple[np.ndarray, ...]]]


class Handle:
    """The operations of one call, which may still be under way. Any thread may use it.

    What has started on the same keys since, or has failed later, makes no difference to it.
    """

    def __init__(self, exchange: Exchange, operations: _Operations) -> None:
        self._exchange = exchange
        self._operations = operations

    def wait(self) -> None:
        """Returns when these operations use the arrays no more. A second call returns, or raises, the same at once.

        Raises the PoseidonError that ended the job while they were under way. The receiving arrays then hold nothing
        useful.
        """
        self._exchange._check_process()
        failure: PoseidonError | None = None
        for layer, number in self._operations:
            try:
                self._exchange._client.wait_operation(layer, number)
            except PoseidonError as error:  # of the whole job: the other keys complete at once, with the same
                failure = failure or error
        if failure is not None:
            raise failure

    @property
    def done(self) -> bool:
        """Whether `wait()` would return at once. Raises the PoseidonError that `wait()` would raise at once."""
        self._exchange._check_process()
        done = all(self._exchange._client.operation_done(layer, number) for layer, number in self._operations)
        if done:
            self.wait()
        return done


class Exchange:
    """This worker's membership of a job whose servers keep an array for every declared key.

    A *step* of a key begins when the first rank pushes (or push_pulls) it, and is complete when every rank has. The
    key's new value is the mean or sum of what was pushed. With a rule, the mean or sum updates the value. So each rank
    must push every key the same number of times. Steps of different keys are independent.

    All methods may be called from any thread. A key has one operation under way at a time. Do not touch an array of an
    operation until it has completed; with `sync=False` the call returns before. The first failure ends the job on every
    rank with the same reason, and every later call raises it. It belongs to the process that connected: in a forked
    child every call raises ShutDown, and the end of the child or of a `with` block in it does nothing.
    """

    def __init__(self, client: Client, *, wire: str = "fp32", parameter_wire: str = "fp32") -> None:
        """Takes over a connected client; use `poseidon.connect`.

        `wire` is how the numbers of float32 arrays travel to the servers, and `parameter_wire` how they come back
        (docs/wire-formats.md). Arrays of other types travel as they are.
        """
        self._client = client
        client.expect_other_threads()  # any thread may call, such as a new one of a pool
        # Servers hold the arrays: no option of the job changes what these may do.
        self._rules = LayerRules()
        self._wishes = LayerWishes("ps", wire, wire_if_float=True, parameter_wire=parameter_wire)
        self._keys: dict[str, _Key] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()  # a forked child inherits this, but not the client's threads
        # Also when the process ends without close(): the others then hear a goodbye, not a death.
        self._shut_down = weakref.finalize(self, client.shutdown)
        self._shut_down.atexit = False  # then `_exchanges` looks first at what has failed
        _exchanges.add(self)

    @property
    def rank(self) -> int:
        """This worker's number, from 0 to world_size - 1."""
        return self._client.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the job."""
        return self._client.world_size

    @property
    def failure(self) -> PoseidonError | None:
        """The error that has ended the job, here or elsewhere, or None. Does not wait."""
        error = self._client.failure
        return None if isinstance(error, ShutDown) else error

    def declare(self, arrays: Mapping[str, Any], *, whole: bool = False, resume: bool = False) -> int:
        """Makes keys known. The servers' values become rank 0's arrays, which are only read.

        Collective: all ranks declare the same keys, sizes and dtypes in the same order; otherwise it raises Mismatch.
        With `whole`, each key lies in one piece on one server core, as LAMB needs; otherwise it is spread over all.
        With `resume`, the servers take values, rules and their state from their newest checkpoint instead, if they have
        one (docs/checkpoints.md). Returns its version, the step after which it was written, otherwise 0. Blocks.
        """
        for name in arrays:
            if not isinstance(name, str) or not name:
                raise InvalidArgument(f"{name!r} is no key: give a text that is not empty")
            if name in self._keys:
                raise InvalidArgument(f"key {name!r} was declared before: declare each key once")
        self._check_open()
        views = {name: _view(name, array) for name, array in arrays.items()}
        if not views:
            return 0
        layers = [self._layer(name, view, whole) for name, view in views.items()]
        first, _ = self._client.add_layers(layers)
        keys = [_Key(name, layer, v.dtype.name, v.shape) for layer, (name, v) in enumerate(views.items(), first)]
        version = self._restore(keys) if resume else 0
        if self.rank == 0 and version == 0:
            self._begin([(key, (_source(key, views[key.name]),)) for key in keys], self._client.assign, sync=True)
        self.barrier()
        self._keys.update({key.name: key for key in keys})
        return version

    def _layer(self, name: str, view: np.ndarray, whole: bool) -> Layer:
        facts = LayerFacts(name, view.dtype.name, math.prod(view.shape), stored=True, whole=whole)
        return self._rules.layer(facts, self._wishes)

    def _restore(self, keys: Sequence[_Key]) -> int:
        """Collective: the version of the servers' checkpoint that these keys have now; 0: none."""
        version = np.zeros(1, "int64")
        if self.rank == 0:
            received = [(key.name, key.layer, np.empty(key.shape, key.dtype)) for key in keys]
            version[0] = restore(self._client, [one for one in received if one[2].size])
        layer, _ = self._client.add_layers([Layer("restored version", "int64", 1, scheme="ps")], transient=True)
        self._client.start(layer, version, 1)
        self._client.wait(layer)
        return int(version[0])

    def set_rule(self, keys: str | Iterable[str], rule: UpdateRule) -> None:
        """Makes servers update these keys by `rule` from the next step on, so that push_pull and pull give parameters.

        Every rank sets the same rule before the same step, or that step raises Mismatch. Consistency ssp and async do
        not compare the rules, and allow only sgd: they update with each rank's part of the gradient by itself, and the
        other kinds divide by its size. A rule of another kind than the key's last one begins with new state. Keys must
        be float32 or float64. UpdateRule("none") ends it.
        The rule's `aggregator`, such as "median", takes the place of the mean. It works without a kind, too:
        UpdateRule("none", aggregator="median") makes push_pull a median of the ranks' arrays, of any floating type.
        """
        self._check_open()
        for key in [self._key(name) for name in ([keys] if isinstance(keys, str) else keys)]:
            self._client.set_rule(key.layer, rule)

    def set_urgency(self, urgencies: Mapping[str, float], threshold: float = 0.5) -> None:
        """Makes more urgent keys overtake others from their next operation on.

        Urgencies are from 1, the first, to 0. Keys without an urgency come last. Keys above `threshold` use the flows
        of the first priority class, whose packets are marked for the network. This changes only the order. Every rank
        sets the same.
        """
        self._check_open()
        for key, urgency in [(self._key(name), urgency) for name, urgency in urgencies.items()]:
            self._client.set_priorities(key.layer, [urgency], [-1], threshold)

    def push_pull(
        self, keys: Keys, arrays: Arrays = None, out: Arrays = None, *, average: bool = True, sync: bool = True
    ) -> Handle:
        """Contributes the arrays and, when every rank has contributed, receives the keys' new values.

        `keys` is one key, several, or a mapping from key to array (then without `arrays`). The values are received into
        `out`, which has the form of `arrays` and may be the same arrays; without it, into `arrays`. With `average` the
        sum is divided by the number of workers; all ranks pass the same. All keys start together. With `sync` it
        returns when all are done. Raises InvalidArgument, before anything starts, if an argument does not fit.
        """
        given = _by_key(keys, arrays, "arrays")
        received = given if out is None else _by_key(keys if isinstance(keys, str) else list(given), out, "out")
        jobs = []
        for name, array in given.items():
            key = self._key(name)
            destination = _destination(key, received[name])
            source = destination if array is received[name] else _source(key, array)
            _check_overlap(key, source, destination)
            jobs.append((key, (source, destination)))
        _check_apart(jobs)
        return self._contribute(jobs, self._client.push_pull, average, sync)

    def push(self, keys: Keys, arrays: Arrays = None, *, average: bool = True, sync: bool = True) -> Handle:
        """Contributes the arrays and receives nothing. Completes when every rank has contributed.

        Otherwise it is like `push_pull`, which other ranks may use for the same step.
        """
        given = _by_key(keys, arrays, "arrays")
        jobs = [(key, (_source(key, given[key.name]),)) for key in map(self._key, given)]
        return self._contribute(jobs, self._client.push, average, sync)

    def pull(self, keys: Keys, out: Arrays = None, *, sync: bool = True) -> Handle:
        """Receives the keys' values as they are now into `out`. Other ranks need not take part."""
        received = _by_key(keys, out, "out")
        jobs = [(key, (_destination(key, received[key.name]),)) for key in map(self._key, received)]
        _check_apart(jobs)
        return self._begin(jobs, self._client.pull, sync)

    def wait_all(self) -> None:
        """Returns when nothing is under way any more that this process has started before.

        Raises the PoseidonError that ended the job, if one has while the newest operation of a key was under way.
        """
        self._check_process()  # before the lock, as in _begin
        with self._lock:
            operations = [(key.layer, key.newest) for key in self._keys.values() if key.newest]
        Handle(self, operations).wait()

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self._check_open()
        self._client.add_layers([])  # waits for all ranks, as it compares what they add

    def close(self) -> None:
        """Waits for operations under way and leaves the job together with all ranks, because each serves the others.

        Further calls have no effect. Raises the PoseidonError that has ended the job, if one has.
        """
        self._check_process()
        if self._shut_down.alive:
            try:
                self.wait_all()
                self.barrier()
            finally:
                self._shut_down()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the exchange. If an exception leaves the block, the other ranks are told and end with it."""
        if os.getpid() != self._process:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        _exchanges.note(error)
        self._tell(error)
        self._shut_down()

    def _tell(self, error: BaseException) -> None:
        # Where this fails it does so because of the same peers; the error itself is on its way.
        with contextlib.suppress(PoseidonError):
            self._client.abort(f"rank {self.rank} failed: {type(error).__name__}: {error}")

    def _key(self, name: str) -> _Key:
        key = self._keys.get(name)
        if key is None:
            known = ", ".join(list(self._keys)[:8]) or "none"
            raise InvalidArgument(f"there is no key {name!r}: declare it on every rank first; declared: {known}")
        return key

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ShutDown(
                f"this process is a forked child of process {self._process}, which connected, and has no part in its "
                "exchange: use the exchange there, or call poseidon.connect() here as a worker of its own"
            )

    def _check_open(self) -> None:
        self._check_process()
        if not self._shut_down.alive:
            raise ShutDown("the exchange is closed: call poseidon.connect() for another one")
        self._client.wait(_NO_LAYER)

    def _contribute(self, jobs: _Jobs, start: Callable[..., int], average: bool, sync: bool) -> Handle:
        divisor = self.world_size if average else 1
        for key, _ in jobs:
            if divisor > 1 and not key.dtype.startswith("float"):
                raise InvalidArgument(f"key {key.name!r} is {key.dtype} and has no mean: pass average=False")
        return self._begin(jobs, lambda *arguments: start(*arguments, divisor), sync)

    def _begin(self, jobs: _Jobs, start: Callable[..., int], sync: bool) -> Handle:
        """Calls `start(layer, *arrays)`, which returns the operation's number, for all keys, or, if one is busy, none.

        The core keeps the arrays as long as it reads or writes them.
        """
        self._check_process()  # before the lock, which may have been held when the child was forked
        _exchanges.note_thread()
        with self._lock:
            self._check_open()
            for key, _ in jobs:
                if not self._client.done(key.layer):
                    raise InvalidArgument(f"key {key.name!r} has an operation under way: wait for its handle first")
            for key, arrays in jobs:
                key.newest = start(key.layer, *arrays)
            operations = [(key.layer, key.newest) for key, _ in jobs]
        handle = Handle(self, operations)
        if sync:
            handle.wait()
        return handle


class _Exchanges(FailureWatch):
    """The exchanges of this process that are open."""

    def __init__(self) -> None:
        super().__init__()
        self._all: weakref.WeakSet[Exchange] = weakref.WeakSet()

    def add(self, exchange: Exchange) -> None:
        self._all.add(exchange)

    def failures(self) -> list[PoseidonError]:
        return [one._client.failure for one in self._open() if one._client.failure is not None]

    def tell(self, error: BaseException) -> None:
        for one in self._open():
            one._tell(error)

    def trains(self, thread: int) -> bool:
        return False  # all of them are noted

    def end(self) -> None:
        for one in self._open():
            one._shut_down()

    def _open(self) -> list[Exchange]:
        return [one for one in self._all if one._shut_down.alive]


_exchanges = _Exchanges()


def _by_key(keys: Keys, arrays: Arrays, what: str) -> dict[str, Any]:
    """Which array belongs to which key."""
    if isinstance(keys, str):
        return {keys: arrays[keys] if isinstance(arrays, Mapping) and keys in arrays else arrays}
    if isinstance(keys, Mapping):
        if arrays is not None:
            raise InvalidArgument(f"{what} were given twice: leave out those beside the mapping")
        return dict(keys)
    names = list(keys)
    if isinstance(arrays, Mapping):
        if set(arrays) != set(names):
            raise InvalidArgument(f"{what} must have the keys {', '.join(names)}, not {', '.join(arrays)}")
        return {name: arrays[name] for name in names}
    if not isinstance(arrays, (list, tuple)) or len(arrays) != len(names):
        raise InvalidArgument(f"{what} must be a list of {len(names)} arrays, one for each key")
    if len(set(names)) != len(names):
        raise InvalidArgument("a key was given twice in one call: give each key once")
    return dict(zip(names, arrays, strict=True))


def _view(name: str, array: Any) -> np.ndarray:
    """The array's own memory as NumPy sees it. Raises InvalidArgument for what cannot be exchanged."""
    if not isinstance(array, np.ndarray):
        array = _as_numpy(name, array)
    if array.dtype.name not in _DTYPES or not array.dtype.isnative:
        raise InvalidArgument(f"the array for key {name!r} is {array.dtype!r}: it must be one of {', '.join(_DTYPES)}")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"the array for key {name!r} is not contiguous: pass a contiguous copy")
    return array


def _as_numpy(name: str, array: Any) -> np.ndarray:
    try:
        if not hasattr(array, "__dlpack__"):
            return np.asarray(memoryview(array))
        if _is_negative_view(array):
            raise ValueError("it is a negative view, whose memory has other values; pass what resolve_neg() returns")
        if array.__dlpack_device__()[0] in _HOST_DEVICES:
            view = np.from_dlpack(array)
            # NumPy takes what comes by a DLPack before 1.0, as of torch 2.4, for read-only. The array knows better.
            same = np.asarray(array) if not view.flags.writeable and hasattr(array, "__array__") else view
            return same if same.ctypes.data == view.ctypes.data else view
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        kind = type(array).__name__
        raise InvalidArgument(f"the {kind} for key {name!r} is no array that can be exchanged: {error}") from error
    raise InvalidArgument(f"the array for key {name!r} is on a device: copy it to CPU memory first")


def _is_negative_view(array: Any) -> bool:
    """Whether it is a tensor of torch's that shows the negatives of what lies in its memory. DLPack does not say so."""
    is_neg = getattr(array, "is_neg", None)
    return is_neg is not None and bool(is_neg())


def _fitting(key: _Key, array: Any) -> np.ndarray:
    view = _view(key.name, array)
    if view.shape != key.shape or view.dtype.name != key.dtype:
        raise InvalidArgument(
            f"key {key.name!r} was declared as {key.dtype} of shape {key.shape}, "
            f"and the given array is {view.dtype.name} of shape {view.shape}: give one of the declared type and shape"
        )
    return view


def _source(key: _Key, array: Any) -> np.ndarray:
    """The array to send, of the key's shape and dtype."""
    view = _fitting(key, array)
    return view if view.flags.writeable else view.copy()  # the binding takes writable memory only


def _destination(key: _Key, array: Any) -> np.ndarray:
    """The array to receive into, writable and of the key's shape and dtype."""
    view = _fitting(key, array)
    if not view.flags.writeable:
        raise InvalidArgument(f"the array that is to receive key {key.name!r} is read-only")
    return view


def _check_overlap(key: _Key, source: np.ndarray, destination: np.ndarray) -> None:
    if source.ctypes.data != destination.ctypes.data and np.may_share_memory(source, destination):
        raise InvalidArgument(f"the two arrays for key {key.name!r} overlap: pass the same one, or two apart")


def _check_apart(jobs: _Jobs) -> None:
    """Raises InvalidArgument if the array that receives one key lies in memory that another key sends or receives."""
    places = [
        (begin, begin + array.nbytes, array is arrays[-1], key.name)
        for key, arrays in (jobs if len(jobs) > 1 else ())
        for begin, array in {array.ctypes.data: array for array in arrays if array.nbytes}.items()
    ]
    reach, received = (0, ""), (0, "")  # the furthest end so far, of any array and of those that receive
    for begin, end, receives, name in sorted(places):
        for until, other in (received, reach) if receives else (received,):
            if begin < until:
                raise InvalidArgument(
                    f"the arrays for keys {other!r} and {name!r} overlap, and one of them receives: pass arrays that "
                    "lie apart"
                )
        reach = max(reach, (end, name))
        received = max(received, (end, name)) if receives else received
