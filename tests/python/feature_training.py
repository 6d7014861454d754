"""One small training job that has some features (features.py), on one rank of several.

`train` makes it, and says what became of it: an error with the moment at which it came, or the parameters
beside those of one process.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import features
import poseidon.torch as poseidon
from feature_models import (
    EVERY,
    Settings,
    Training,
    compared,
    drops,
    has_batch,
    make_optimizer,
    reference,
    row_count,
    size_of,
)
from feature_models import step_count as steps_of
from features import with_prefix
from poseidon.errors import PoseidonError
from poseidon.torch.process.context import memberships
from torch_cases import digest
from waiting import SLOWED, compute_for, happens

TIMEOUT_S = 8.0 * SLOWED  # of the job
_PATIENCE_S = 4.0 * SLOWED  # in which the other ranks meet an error of their own, before they hear of this one's
_HEAD_START_S = 0.01  # of rank 0, which the others otherwise find after a tenth of a second
_PART = (0, 2)
_SLOW, _PAUSE_FROM, _PAUSE_S = 2, 12, 0.04


@dataclass
class Answer:
    """What a rank says of a job. `kind`: of its error; "" if there was none."""

    rank: int
    at: str = ""  # the moment of the error
    kind: str = ""
    text: str = ""
    trace: str = ""
    is_own: bool = False  # the error is one of Poseidon's
    digest: str = ""
    distance: float = 0.0  # to the parameters of one process, as a part of the way that these have gone
    cosine: float = 1.0  # of the two ways
    ratio: float = 1.0  # of their lengths
    one_process: str = ""  # the error that one process has
    unseen: list[str] = field(default_factory=list)  # features that were not in effect


class Moment:
    """Where a rank is: written to a file, since it may never answer."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"moment-{rank}"
        self.name = ""

    def __call__(self, name: str) -> None:
        self.name = name
        self._file.write_text(name)


def train(rank: int, port: int, folder: Path, servers: str, names: Sequence[str]) -> Answer:
    """Trains the job of these features as one rank, and leaves it."""
    settings = features.combine(names)
    assert settings is not None
    answer, moment = Answer(rank), Moment(folder, rank)
    mine: list[Mine] = []
    try:
        begin(settings, rank, port, folder, servers, moment)
        if settings.get("part") and rank not in _PART:
            _stand_by(settings, rank, port, folder, servers, moment)
        else:
            mine = _train(settings, rank, port, folder, servers, moment)
        moment("end")
        answer.unseen = [name for name in names if mine and not _is_seen(features.BY_NAME[name].sets, mine)]
        answer.digest = digest(tensor for one in mine for tensor in compared(settings, one.module))
    except Exception as error:
        _note(answer, error, moment.name)
    _mark(folder, "done", rank)
    _leave(settings, answer, moment, folder)
    if rank == 0:
        compare(settings, answer, mine)
    return answer


def _note(answer: Answer, error: Exception, at: str) -> None:
    answer.at, answer.kind, answer.text = at, type(error).__name__, str(error)
    answer.trace, answer.is_own = traceback.format_exc()[-1500:], isinstance(error, PoseidonError)


def _leave(settings: Settings, answer: Answer, moment: Moment, folder: Path) -> None:
    if answer.kind:
        _wait_for(folder, "done", _PART if settings.get("part") else range(size_of(settings)), _PATIENCE_S)
        for here in memberships():
            with contextlib.suppress(PoseidonError):
                here.abort(RuntimeError(answer.text))
    moment("shutdown")
    try:
        poseidon.shutdown()
    except Exception as error:
        if not answer.kind:
            _note(answer, error, moment.name)
    moment("left")


def _mark(folder: Path, what: str, rank: int) -> None:
    (folder / f"{what}-{rank}").touch()


def _wait_for(folder: Path, what: str, ranks: Sequence[int], seconds: float) -> None:
    happens(lambda: all((folder / f"{what}-{rank}").exists() for rank in ranks), seconds)


def compare(settings: Settings, answer: Answer, mine: Sequence[Mine]) -> None:
    """With one process, also where it was an error."""
    try:
        alone = [_reference(settings, number) for number in range(_models(settings))]
    except Exception as error:
        answer.one_process = f"{type(error).__name__}: {error}"
        return
    if answer.kind:
        return
    ways = []
    for one, other in zip(mine, alone, strict=True):
        got, wanted = (list(compared(settings, training.module)) for training in (one, other))
        start = [*other.start, *(torch.zeros_like(buffer) for buffer in got[len(other.start) :])]
        ways += [
            (a.detach().double() - c.double(), b.detach().double() - c.double())
            for a, b, c in zip(got, wanted, start, strict=True)
        ]
    whole = torch.cat([way.flatten() for _, way in ways])
    own = torch.cat([way.flatten() for way, _ in ways])
    least = 0.05 * whole.norm()
    answer.distance = max(float((a - b).norm() / max(b.norm(), least)) for a, b in ways)
    answer.cosine = float(whole @ own / (whole.norm() * own.norm()))
    answer.ratio = float(own.norm() / whole.norm())


_references: dict[tuple[int, str], Any] = {}


def _reference(settings: Settings, number: int) -> Any:
    """The training in one process, which most options do not change. Its own error, if it has one."""
    names = ("init.stragglers", "in time", "init.checkpoint_every")
    parts = {key: value for key, value in settings.items() if not key.startswith(("init.", "by_rank.")) or key in names}
    for name in ("scheme", "wire", "hooks", "torch", "secret", "servers", "compiled"):
        parts.pop(name, None)
    key = number, repr((size_of(settings), sorted(parts.items())))
    if key not in _references:
        _references[key] = reference(settings, number, features.averages(settings))
    return _references[key]


def _is_seen(sets: Settings, mine: Sequence[Mine]) -> bool:
    """Whether the schemes and wire formats of a feature are those of some layer in the last step.

    What resumes has gone on from a step.
    """
    if sets.get("own.resume") and not any(map(_resumed_version, mine)):
        return False
    schemes, wires = set(), set()
    for one in mine:
        if isinstance(one.model, poseidon.DistributedDataParallel):
            schemes |= {layer.scheme for layer in one.model.synchronization_stats()}
            hooked = one.model.synchronizer is not None and one.model.synchronizer.hooked is not None
            wires |= set() if hooked else {entry.asked.wire for entry in one.model.synced_parameters}
        else:
            wires |= {entry.asked.wire for entry in one.optimizers[0]._found}
    return set(sets.get("scheme", ())) <= schemes and set(sets.get("wire", ())) <= wires


# One rank's part.


class Mine(Training):
    """One model's training in the job, as one rank."""

    def __init__(self, settings: Settings, number: int, rank: int, group: Any, moment: Moment) -> None:
        super().__init__(settings, number)
        self._rank = rank
        if settings.get("replica"):
            _shard(self.module)
        if settings.get("compiled"):
            self.model = torch.compile(self.module, backend="eager")
        self.wraps = features.wraps(settings)
        if self.wraps:
            moment("wrap")
            options = features.wrapper_options(settings)
            self.model = poseidon.DistributedDataParallel(self.model, process_group=group, **options)
        self.add_hooks()
        moment("hook")
        for hook in settings.get("hooks", ()):
            self.model.register_comm_hook(*_hook(hook, group))
        moment("optimizer")
        self.change_optimizer()

    def change_optimizer(self) -> None:
        settings, params = self.settings, list(self.module.parameters())
        for former in self.optimizers:
            if isinstance(former, poseidon.LocalSGD):
                former.average()
        trainers, own = features.sorted_trainers(settings), with_prefix(settings, "own.")
        if set(trainers) == {"worker", "server"}:
            head = list(self.module.last.parameters())
            rest = [param for param in params if all(param is not one for one in head)]
            self.optimizers = [
                poseidon.DistributedOptimizer(make_optimizer(settings, part), self.model, update=update, **own)
                for part, update in ((rest, "worker"), (head, "server"))
            ]
            return
        optimizer = make_optimizer(settings, params)
        for trainer in trainers:
            if trainer in ("worker", "server"):
                optimizer = poseidon.DistributedOptimizer(optimizer, self.model, update=trainer, **own)
            else:
                more = {"outer": poseidon.OuterNesterov()} if trainer == "outer" else {}
                more |= {"fragments": 2, "overlap_steps": 1} if trainer == "streaming" else {}
                optimizer = poseidon.LocalSGD(self.model, optimizer, EVERY, **more, **own)
        self.optimizers = [optimizer]

    def without_exchange(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if self.wraps else nullcontext()  # type: ignore[no-any-return]

    def gradients(self, step: int) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self.backward(step, self._rank)

    def prepare(self, step: int) -> None:
        super().prepare(step)
        if self.settings.get("weights"):
            rows = row_count(self.settings, self._rank)
            if self.wraps:
                self.model.set_weight(rows)
            elif self.optimizers[0].steps_alone == 0:
                self.optimizers[0].set_weight(rows)

    def finish(self) -> None:
        """Makes all replicas what they are in the end."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, poseidon.LocalSGD):
                optimizer.average()
            elif isinstance(optimizer, poseidon.DistributedOptimizer):
                optimizer.synchronize()
                optimizer.pull_parameters()
        self.model.eval()
        with torch.no_grad():
            self.model(*self.batch(0, 0, self._rank)[:-1])  # takes rank 0's buffers


def _shard(module: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def _hook(kind: str, group: Any) -> tuple[Any, Callable[..., Any]]:
    """The state and the communication hook."""
    if kind == "powersgd":
        return PowerSGDState(group, matrix_approximation_rank=12, start_powerSGD_iter=2), powerSGD_hook
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook, "own": _mean_hook}
    return group, hooks[kind]


def _mean_hook(group: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size(group))


def init_options(settings: Settings, rank: int, folder: Path, servers: str) -> dict[str, Any]:
    """The options of poseidon.init, without the rank's place."""
    options = {"timeout": TIMEOUT_S, "small_bytes": 256, "flight_record": "off", "job": folder.name}
    options |= with_prefix(settings, "init.")
    options |= {name: letters[rank] for name, letters in with_prefix(settings, "by_rank.").items()}
    for what in ("scheme", "wire"):
        if len(settings.get(what, ())) == 1:
            options[what] = settings[what][0]
    if "checkpoint_every" in options:
        options["checkpoint_dir"] = str(folder / "checkpoints")
    if settings.get("secret"):
        options["secret_file"] = str(folder / "secret")
    return options | ({"servers": servers} if servers else {})


def begin(settings: Settings, rank: int, port: int, folder: Path, servers: str, moment: Moment) -> None:
    """Joins the job."""
    moment("init")
    size = size_of(settings)
    compute_for(_HEAD_START_S if rank else 0)
    if dist.is_initialized() and dist.get_world_size() == 1:  # of a replica in a job before
        dist.destroy_process_group()
    if settings.get("replica"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        poseidon.init(replica=f"{rank}/{size}@127.0.0.1:{port}", **init_options(settings, rank, folder, servers))
        return
    place = {"rank": rank, "world_size": size, "local_rank": rank, "local_world_size": size}
    place |= {"master_addr": "127.0.0.1", "master_port": port}
    poseidon.init(**place, **init_options(settings, rank, folder, servers))
    if settings.get("torch") and not dist.is_initialized():
        moment("torch's init")
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _models(settings: Settings) -> int:
    return int(settings.get("models", 1))


def _stand_by(settings: Settings, rank: int, port: int, folder: Path, servers: str, moment: Moment) -> None:
    """What a rank does that is in no group that trains: it belongs to the job of all ranks, also when that resumes."""
    if settings.get("own.resume"):
        _wait_for(folder, "resumes", _PART, 3 * _PATIENCE_S)
        _leave_and_return(settings, rank, port, folder, servers, moment)
    _wait_for(folder, "done", _PART, 3 * _PATIENCE_S)


def _leave_and_return(settings: Settings, rank: int, port: int, folder: Path, servers: str, moment: Moment) -> None:
    _mark(folder, "resumes", rank)
    moment("shutdown before resume")
    poseidon.shutdown()
    begin(settings, rank, port, folder, servers, moment)


def _train(settings: Settings, rank: int, port: int, folder: Path, servers: str, moment: Moment) -> list[Mine]:
    torch.compiler.reset() if settings.get("compiled") else None
    group = dist.new_group(_PART, use_local_synchronization=True) if settings.get("part") else None
    mine = [Mine(settings, number, rank, group, moment) for number in range(_models(settings))]
    if settings.get("own.resume"):
        _loop(settings, mine, rank, folder, moment, stop=steps_of(settings) // 2)
        _leave_and_return(settings, rank, port, folder, servers, moment)
        mine = [Mine(settings, number, rank, group, moment) for number in range(_models(settings))]
    _loop(settings, mine, rank, folder, moment, stop=steps_of(settings))
    for one in mine:
        one.finish()
    return mine


def _resumed_version(one: Mine) -> int:
    return max(getattr(optimizer, "resumed_version", 0) for optimizer in one.optimizers)


def _loop(settings: Settings, mine: Sequence[Mine], rank: int, folder: Path, moment: Moment, stop: int) -> None:
    start = max(map(_resumed_version, mine))
    with ExitStack() as joined:
        if settings.get("join"):
            moment("join")
            for one in mine:
                joined.enter_context(one.model.join())
        for step in _steps(settings, mine, folder, moment, start, stop):
            if not has_batch(settings, step, rank):
                break
            moment(f"step {step}")
            if drops(settings) and rank == _SLOW and step >= _PAUSE_FROM:
                compute_for(_PAUSE_S)
            for one in mine:
                one.step(step)
        moment("after the last step")


def recovered_objects(mine: Sequence[Mine]) -> list[Any]:
    """What a step changes, for `Recovery`."""
    objects = [one.model for one in mine if one.wraps]
    objects += [optimizer for one in mine for optimizer in one.optimizers]
    return objects + [one.scaler for one in mine if one.scaler is not None]


def _steps(
    settings: Settings, mine: Sequence[Mine], folder: Path, moment: Moment, start: int, stop: int
) -> Iterator[int]:
    """The numbers of the steps; with on_failure in attempts of a Recovery, which see no error of the loop."""
    if settings.get("init.on_failure", "abort") == "abort":
        yield from range(start, stop)
        return
    moment("Recovery")
    directory = folder / "states" if features.averages(settings) else None
    recovery = poseidon.Recovery(*recovered_objects(mine), directory=directory)
    while recovery.until(stop):
        with recovery.attempt():
            yield recovery.step
