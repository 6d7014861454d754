"""Random jobs of push and pull on arrays: what a seed stands for, and its values beside those of one process.

As an adapter for workers.py it has `init()`, which connects, and `shutdown()`.
"""

from __future__ import annotations

import array
import hashlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import poseidon
from poseidon.errors import InvalidArgument
from rule_reference import RULES, Reference
from waiting import compute_for

DTYPES = ("float32", "float32", "float64", "float16", "int32", "int64", "uint8")
CALLS = (
    *("push_pull", "in place", "push", "push or push_pull", "pull", "asynchronous", "one by one", "threads"),
    *("read only", "parts of a buffer", "other objects", "refused"),
)
BESIDES = ("", "", "", "urgency", "barrier", "late", "declare", "learning rate", "end of the rule")
GUARD = 37  # the value beside a part of a buffer


@dataclass(frozen=True)
class Key:
    """One declared key."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: str  # of RULES, median, or none
    average: bool


@dataclass(frozen=True)
class Job:
    """One random job: its keys, and for each step a call for them and what else happens."""

    keys: tuple[Key, ...]
    later: tuple[Key, ...]  # declared in mid-run
    steps: tuple[tuple[str, str], ...]


def make(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)
    whole = "wire" not in options(seed)  # a median takes values as they are
    keys = [_key(draw, f"{seed}.{number}", whole) for number in range(draw.randint(1, 6))]
    later = [_key(draw, f"{seed}.later.{number}", whole) for number in range(draw.randint(1, 2))]
    steps = [(draw.choice(CALLS), draw.choice(BESIDES)) for _ in range(draw.randint(2, 7))]
    return Job(tuple(keys), tuple(later), tuple(steps))


def _key(draw: random.Random, name: str, median: bool) -> Key:
    smallest = 0 if draw.random() < 0.1 else 1
    shape = tuple(draw.randint(smallest, 40) for _ in range(draw.randint(0, 3)))
    dtype, rule = draw.choice(DTYPES), ""
    if draw.random() < 0.4:
        rule = draw.choice(list(RULES)) if dtype in ("float32", "float64") and 0 not in shape else ""
    elif draw.random() < 0.2 and dtype.startswith("float") and median:
        rule = "median"
    average = dtype.startswith("float") and (bool(rule) or draw.random() < 0.5)
    return Key(name, shape, dtype, rule, average)


def options(seed: int) -> dict[str, Any]:
    """What connect() gets. Few different ones, since each costs the workers a new meeting."""
    return random.Random(seed // 25).choice(
        [
            {},
            {"chunk_bytes": 64, "priority_classes": 2},
            {"chunk_bytes": 1024, "transport": "tcp"},
            {"chunk_bytes": 1024, "wire": "bf16"},
            {"chunk_bytes": 4096, "parameter_wire": "bf16"},
            {"server_cores": 0, "chunk_bytes": 1 << 16},
            {"server_cores": 2, "flows": 2, "chunk_bytes": 512},
            {"chunk_bytes": 1024, "replica_check": 1},
        ]
    )


_exchange: poseidon.Exchange | None = None
_connected: dict[str, Any] = {}


def init(**options: Any) -> None:
    """Joins the job."""
    global _exchange, _connected
    _exchange, _connected = poseidon.connect(**options), options


def shutdown() -> None:
    """Leaves the job, if there is one."""
    global _exchange
    if _exchange is not None:
        leaving, _exchange = _exchange, None
        leaving.close()


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 has it, to the nearest, of two the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


class Held:
    """What the servers hold for one key, as one process computes it."""

    def __init__(self, seed: int, key: Key, size: int) -> None:
        self.key, self.seed, self.size = key, seed, size
        self.count, self.rule, self.wire = 0, key.rule, _connected.get("wire", "fp32")
        self.value = self.part(0)
        self.reference = Reference(key.rule, self.value.astype(np.float64)) if key.rule in RULES else None
        self.updated = False  # by a rule, and so rounded

    def part(self, rank: int) -> np.ndarray:
        """What a rank contributes to the present step. Whole numbers, whose sums are exact, where there is no rule."""
        draw = np.random.default_rng([self.seed, rank, self.count, *self.key.name.encode()])
        if self.rule in RULES:
            return np.asarray(draw.normal(size=self.key.shape), self.key.dtype)
        return np.asarray(draw.integers(0, 16, self.key.shape), self.key.dtype)

    def step(self) -> None:
        """All ranks contribute."""
        parts = [self.part(rank).astype(np.float64) for rank in range(self.size)]
        if self.key.dtype == "float32" and self.wire == "bf16":
            parts = [_rounded(part).astype(np.float64) for part in parts]
        combined = np.median(parts, 0) if self.rule == "median" else sum(parts) / (self.size if self.key.average else 1)
        if self.reference is not None:
            combined = self.reference.step(combined)
        self.updated = self.reference is not None
        self.value = np.asarray(combined).astype(self.key.dtype)
        self.count += 1

    def check(self, found: np.ndarray) -> None:
        """Raises AssertionError unless this is what a rank has received."""
        if self.updated:
            rounds = self.key.dtype == "float32" and _connected.get("parameter_wire") == "bf16"
            limit = 2**-8 if rounds else 2e-5 if self.key.dtype == "float32" else 1e-9
            np.testing.assert_allclose(found, self.value, rtol=limit, atol=limit, err_msg=self.key.name)
        elif self.size & (self.size - 1):  # a mean of three is rounded
            np.testing.assert_allclose(found, self.value, rtol=1e-6 if found.itemsize > 2 else 2e-3)
        else:
            np.testing.assert_array_equal(found, self.value, err_msg=self.key.name)


class Run:
    """The job on one rank."""

    def __init__(self, seed: int, exchange: poseidon.Exchange) -> None:
        self.seed, self.exchange, self.job = seed, exchange, make(seed)
        self.own = random.Random(1000 * seed + exchange.rank)  # what this rank does in its own order
        self.held: dict[str, Held] = {}
        self.buffers: dict[str, np.ndarray] = {}
        self.declare(self.job.keys)

    def declare(self, keys: tuple[Key, ...]) -> None:
        for key in keys:
            held = self.held[key.name] = Held(self.seed, key, self.exchange.world_size)
            self.exchange.declare({key.name: held.part(self.exchange.rank)}, whole=key.rule == "lamb")
            if key.rule == "median":
                self.exchange.set_rule(key.name, poseidon.UpdateRule("none", aggregator="median"))
            elif key.rule:
                self.exchange.set_rule(key.name, poseidon.UpdateRule(key.rule.partition(" ")[0], **RULES[key.rule]))
            self.buffers[key.name] = np.zeros(key.shape, key.dtype)

    def step(self, call: str, besides: str) -> None:
        self.besides(besides)
        for average in (False, True):
            names = [name for name, held in self.held.items() if held.key.average == average]
            mine = {name: self.held[name].part(self.exchange.rank) for name in names}
            if not names:
                continue
            if call != "pull":
                for name in names:
                    self.held[name].step()
            method = getattr(self, call.replace(" ", "_"))
            for name, found in method(mine, average).items():
                self.held[name].check(found)

    def besides(self, what: str) -> None:
        rules = [held for held in self.held.values() if held.reference is not None]
        if what == "urgency":
            draw = random.Random(self.seed + len(self.held))
            self.exchange.set_urgency({name: draw.random() for name in self.held}, draw.random())
        elif what == "barrier":
            self.exchange.barrier()
        elif what == "late":
            compute_for(0.002 * self.own.randint(0, 3))
        elif what == "declare" and self.job.later[0].name not in self.held:
            self.declare(self.job.later)
        elif what == "learning rate":
            for held in rules:
                held.reference.rule["lr"] *= 0.5  # type: ignore[union-attr]
                rule = {**RULES[held.rule], "lr": held.reference.rule["lr"]}  # type: ignore[union-attr]
                self.exchange.set_rule(held.key.name, poseidon.UpdateRule(held.rule.partition(" ")[0], **rule))
        elif what == "end of the rule":
            for held in rules:
                held.reference, held.rule = None, ""
                self.exchange.set_rule(held.key.name, poseidon.UpdateRule("none"))

    def garbage(self, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.full_like(one, 99) for name, one in like.items()}

    def push_pull(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        out, sent = self.garbage(mine), {name: one.copy() for name, one in mine.items()}
        if self.seed % 2:
            self.exchange.push_pull(list(mine), list(mine.values()), list(out.values()), average=average)
        else:
            self.exchange.push_pull(mine, out=out, average=average)
        for name, one in mine.items():
            np.testing.assert_array_equal(one, sent[name], err_msg="what was sent is never written")
        return out

    def in_place(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        """Into the arrays that are sent, which are the same ones each time."""
        for name, one in mine.items():
            self.buffers[name][...] = one
        buffers = {name: self.buffers[name] for name in mine}
        self.exchange.push_pull(buffers, average=average)
        found = {name: one.copy() for name, one in buffers.items()}
        for one in buffers.values():
            one.fill(77)
        return found

    def push(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        self.exchange.push(mine, average=average)
        for one in mine.values():
            one.fill(55)  # it was sent
        return self.pull(mine, average)

    def push_or_push_pull(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        if (self.exchange.rank + self.seed) % 2:
            return self.push(mine, average)
        return self.push_pull(mine, average)

    def pull(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        out = self.garbage(mine)
        self.exchange.pull(out)
        return out

    def asynchronous(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        """Each rank begins and waits in its own order. A copy that nobody holds is sent."""
        out = self.garbage(mine)
        handles = [
            self.exchange.push_pull(name, mine[name].copy(), out[name], average=average, sync=False)
            for name in self.own.sample(list(mine), len(mine))
        ]
        if self.own.random() < 0.3:
            self.exchange.wait_all()
            assert all(handle.done for handle in handles)
        for handle in self.own.sample(handles, len(handles)):
            handle.wait()
        return out

    def one_by_one(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        out = self.garbage(mine)
        for name, one in mine.items():
            self.exchange.push_pull(name, one, out[name], average=average)
            one.fill(44)
        return out

    def threads(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        out = self.garbage(mine)

        def work(name: str) -> None:
            self.exchange.push_pull(name, mine[name], out[name], average=average)
            mine[name].fill(33)

        with ThreadPoolExecutor(len(mine)) as pool:
            list(pool.map(work, self.own.sample(list(mine), len(mine))))
        return out

    def read_only(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        for one in mine.values():
            one.flags.writeable = False
        out = self.garbage(mine)
        handle = self.exchange.push_pull(mine, out=out, average=average, sync=False)
        for one in mine.values():  # a read-only array is copied before it is sent
            one.flags.writeable = True
            one.fill(22)
        handle.wait()
        return out

    def parts_of_a_buffer(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        """Views of one buffer, beside which nothing may be written."""
        spaces = {name: np.full((2, 3, *one.shape), GUARD, one.dtype) for name, one in mine.items()}
        for name, one in mine.items():
            spaces[name][0, 1, ...] = one
        self.exchange.push_pull(
            {name: space[0, 1, ...] for name, space in spaces.items()},
            out={name: space[1, 1, ...] for name, space in spaces.items()},
            average=average,
        )
        for name, space in spaces.items():
            np.testing.assert_array_equal(space[:, ::2], np.full_like(space[:, ::2], GUARD))
            np.testing.assert_array_equal(space[0, 1, ...], mine[name])
        return {name: space[1, 1, ...] for name, space in spaces.items()}

    def other_objects(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        """What has the buffer protocol, or DLPack."""
        out = self.garbage(mine)
        for name, one in mine.items():
            given: Any = one
            code = {"float32": "f", "float64": "d", "uint8": "B", "int32": "i"}.get(one.dtype.name)
            if one.ndim == 1 and one.size and code is not None:
                given = array.array(code, one.tolist())
            self.exchange.push_pull(name, given, memoryview(out[name]), average=average)
        return out

    def refused(self, mine: dict[str, np.ndarray], average: bool) -> dict[str, np.ndarray]:
        """Calls that do not fit change nothing, on this rank and on others."""
        out = self.garbage(mine)
        name, one = self.own.choice(list(mine.items()))
        wide = np.zeros((*one.shape, 2), one.dtype)
        wrong: list[Callable[[], Any]] = [
            lambda: self.exchange.push_pull({**mine, "nothing": one}, average=average),
            lambda: self.exchange.push({**mine, name: wide}, average=average),
            lambda: self.exchange.push({**mine, name: one.astype("complex64")}, average=average),
            lambda: self.exchange.push_pull([*mine, name], [*mine.values(), one], average=average),
        ]
        if one.size > 1:
            wrong.append(lambda: self.exchange.push({**mine, name: wide[..., 0]}, average=average))
        for call in self.own.sample(wrong, 2):
            try:
                call()
            except InvalidArgument:
                continue
            raise AssertionError("a call that does not fit was not refused")
        handle = self.exchange.push_pull(mine, out=out, average=average, sync=False)
        handle.wait()
        return out


def run_job(seed: int) -> str:
    """Collective: does the job of a seed, and compares every value. Returns a digest, equal on all ranks."""
    assert _exchange is not None
    run = Run(seed, _exchange)
    for call, besides in run.job.steps:
        run.step(call, besides)
    values = {name: np.zeros(held.key.shape, held.key.dtype) for name, held in run.held.items()}
    _exchange.pull(values)
    return hashlib.blake2b(b"".join(one.tobytes() for one in values.values()), digest_size=8).hexdigest()
