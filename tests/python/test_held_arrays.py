"""An array stays in memory as long as the core may read or write it, whoever else waits, starts or fails meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.launch import free_port
from waiting import wait_for

_core = pytest.importorskip("poseidon._core", reason="the compiled core is not built")
SIZE = 5000


def joined(port: int) -> tuple[poseidon.Exchange, Any, int, int]:
    """With two layers."""
    exchange = poseidon.connect(master_port=port, timeout=20, small_bytes=0)
    layers = [_core.Layer(name, "float32", SIZE, scheme="ps") for name in ("first", "second")]
    first, _ = exchange._client.add_layers(layers)
    return exchange, exchange._client, first, first + 1


def array() -> tuple[np.ndarray, weakref.ref[np.ndarray]]:
    made = np.ones(SIZE, "float32")
    return made, weakref.ref(made)


def is_held(known: weakref.ref[np.ndarray]) -> bool:
    gc.collect()
    return known() is not None


def started(client: Any, layer: int) -> weakref.ref[np.ndarray]:
    """Starts an exchange of an array that nobody but the core knows."""
    given, known = array()
    client.start(layer, given, 2)
    return known


def fails(port: int, folder: Path) -> tuple[bool, bool]:
    exchange, client, one, two = joined(port)
    if exchange.rank == 1:
        wait_for(folder / "started")
        client.abort("rank 1 has had enough")
        return False, False
    first, second = started(client, one), started(client, two)
    (folder / "started").touch()
    with pytest.raises(PoseidonError, match="had enough"):
        client.wait(one)
    waited = is_held(first)
    with pytest.raises(PoseidonError, match="had enough"):
        client.wait_all()
    return waited, is_held(second)


def test_a_wait_lets_go_of_what_has_failed(tmp_path: Path) -> None:
    """The core has let go of it, too. A job that goes on with other ranks needs the memory."""
    assert workers.run(2, fails, free_port(), tmp_path) == [(False, False)] * 2


def starts_twice(port: int) -> tuple[bool, bool]:
    exchange, client, one, two = joined(port)
    first, known = array()
    if exchange.rank == 1:
        started(client, two)
        client.wait(two)
    client.start_all(one, _core.Arrays([first]), 2)
    del first
    held = True
    if exchange.rank == 0:
        with pytest.raises(InvalidArgument, match="started twice"):
            client.start_all(one, _core.Arrays([array()[0]]), 2)
        held = is_held(known)
        started(client, two)
        client.wait(two)
    client.wait_range(one, 1)
    released = not is_held(known)
    exchange.close()
    return held, released


def test_a_start_that_is_refused_does_not_let_go_of_the_array_of_the_one_under_way() -> None:
    assert workers.run(2, starts_twice, free_port()) == [(True, True)] * 2


def waits_beside(port: int, folder: Path) -> tuple[bool, bool]:
    """The thread's wait for all is over, but the thread has not got the interpreter when another exchange starts."""
    exchange, client, one, two = joined(port)
    if exchange.rank == 1:
        wait_for(folder / "waits")
        started(client, one)
        client.wait(one)
        wait_for(folder / "next one started")
        started(client, two)
        client.wait(two)
        exchange.close()
        return True, True
    started(client, one)
    waiter = threading.Thread(target=client.wait_all)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        waiter.start()  # the thread gives the interpreter back no sooner than in its wait
        (folder / "waits").touch()
        while not client.done(one):
            pass
        end_s = time.perf_counter() + 0.05
        while time.perf_counter() < end_s:
            pass
        known = started(client, two)
    finally:
        sys.setswitchinterval(interval_s)
    (folder / "next one started").touch()
    waiter.join()
    held = is_held(known)
    client.wait(two)
    released = not is_held(known)
    exchange.close()
    return held, released


def test_a_wait_for_all_lets_go_only_of_what_had_started_before_it(tmp_path: Path) -> None:
    assert workers.run(2, waits_beside, free_port(), tmp_path) == [(True, True)] * 2
