"""A handle of push and pull waits for its own operation, whatever starts, ends or fails beside it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import poseidon
import workers
from poseidon.errors import PoseidonError
from poseidon.launch import free_port
from waiting import compute_for, wait_for

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
KEYS = ("a", "b")
BUSY_S = 0.4  # in which a thread that waits looks around, as it does every 0.1 s


def joined(port: int) -> poseidon.Exchange:
    exchange = poseidon.connect(master_port=port, timeout=20)
    exchange.declare({name: np.zeros(2000, "float32") for name in KEYS})
    return exchange


def push(exchange: poseidon.Exchange, value: float = 1.0) -> poseidon.exchange.Handle:
    return exchange.push({name: np.full(2000, value, "float32") for name in KEYS}, sync=False)


def started_meanwhile(port: int, folder: Path, waits_for: str) -> list[bool]:
    """Rank 0: whether a thread's wait is over although the next operation is under way, and whether that is done.

    The thread has not got the interpreter when its operation ends, so the next one starts before it looks.
    """
    exchange = joined(port)
    client, layers = exchange._client, [exchange._keys[name].layer for name in KEYS]
    first = push(exchange) if exchange.rank == 0 else None
    if first is None:
        wait_for(folder / "busy")
        compute_for(BUSY_S)
        push(exchange).wait()
        wait_for(folder / "seen")
        push(exchange).wait()
        exchange.close()
        return []
    next_arrays = [np.ones(2000, "float32") for _ in KEYS]
    waits = {"handle": first.wait, "all": exchange.wait_all, "layer": lambda: client.wait(layers[0])}
    waiter = threading.Thread(target=waits[waits_for])
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        waiter.start()  # the thread gives the interpreter back no sooner than in its wait
        (folder / "busy").touch()
        while not all(map(client.done, layers)):
            pass
        for layer, array in zip(layers, next_arrays, strict=True):
            client.push(layer, array, 2)  # which does not let go of the interpreter
    finally:
        sys.setswitchinterval(interval_s)
    waiter.join(5)
    seen = [not waiter.is_alive(), first.done, client.done(layers[0])]
    (folder / "seen").touch()
    for layer in layers:
        client.wait(layer)
    waiter.join()
    exchange.close()
    return seen


@pytest.mark.parametrize("waits_for", ["handle", "all", "layer"])
def test_a_wait_is_over_although_the_next_operation_has_started(tmp_path: Path, waits_for: str) -> None:
    assert workers.run(2, started_meanwhile, free_port(), tmp_path, waits_for)[0] == [True, True, False]


def failed(port: int, folder: Path) -> list[str]:
    """What each wait raises, of an operation that has completed and of one that has failed."""
    exchange = joined(port)
    first = push(exchange)
    first.wait()
    exchange.barrier()
    if exchange.rank == 1:
        wait_for(folder / "pushed")
        exchange._client.abort("rank 1 has had enough")
        return []
    second = push(exchange)
    (folder / "pushed").touch()
    texts = []
    for call in (second.wait, exchange.wait_all, second.wait, lambda: second.done):
        with pytest.raises(PoseidonError, match="had enough") as error:
            call()
        texts.append(f"{type(error.value).__name__}: {error.value}")
    first.wait()
    assert first.done
    with pytest.raises(PoseidonError, match="had enough"):
        exchange.close()
    first.wait()
    with pytest.raises(PoseidonError, match="had enough"):
        second.wait()
    return texts


def test_a_handle_raises_what_its_own_operation_did_as_often_as_it_is_asked(tmp_path: Path) -> None:
    texts = workers.run(2, failed, free_port(), tmp_path)[0]
    assert len(texts) == 4
    assert len(set(texts)) == 1
