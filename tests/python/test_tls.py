"""TLS from Python: workers that use it, processes that disagree about it, and when it cannot be had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import poseidon
import workers
from poseidon import options
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.launch import free_port
from server_process import server_process

_core = pytest.importorskip("poseidon._core", reason="the compiled core is not built")
SECRET = "correct horse battery"
needs_openssl = pytest.mark.skipif(not _core.tls_available(), reason="this build has no OpenSSL")


def alone(address: str, **given: Any) -> poseidon.Exchange:
    return poseidon.connect(servers=[address], secret=SECRET, timeout=20, master_port=free_port(), **given)


def sums(port: int) -> None:
    """Of arrays of several sizes, on every rank."""
    given = {"secret": SECRET, "tls": "on", "transport": "tcp", "chunk_bytes": 65536, "timeout": 20}
    with poseidon.connect(master_port=port, **given) as exchange:
        arrays = {name: np.full(size, exchange.rank + 1.0, "float32") for name, size in (("w", 300_000), ("b", 3))}
        exchange.declare(arrays)
        for _ in range(3):
            for name, array in arrays.items():
                held = array.copy()
                exchange.push_pull(name, held)
                assert np.all(held == 1.5)


@needs_openssl
def test_workers_exchange_over_it() -> None:
    workers.run(2, sums, free_port())


@needs_openssl
def test_a_server_of_the_command_line_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_SECRET", SECRET)
    with server_process("--tls", "on") as (_, address):
        with alone(address, tls="on") as exchange:
            exchange.declare({"w": np.zeros(1000, "float32")})
            array = np.full(1000, 3.0, "float32")
            exchange.push_pull("w", array)
            assert np.all(array == 3)
        with pytest.raises(Mismatch, match="has tls=on, this process tls=off"):
            alone(address, tls="off")


@needs_openssl
def test_who_disagrees_with_the_store_is_told_so_at_once() -> None:
    port = free_port()
    place = {"world_size": 2, "master_addr": "127.0.0.1", "master_port": port, "secret": SECRET, "timeout": 20}
    store = _core.open_store(options.resolve(rank=0, **place).core())
    with pytest.raises(Mismatch, match="tls=off, this process tls=on; give all processes"):
        poseidon.connect(rank=1, tls="on", **place)
    del store


def test_it_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSEIDON_SECRET", raising=False)
    with pytest.raises(InvalidArgument, match="tls=on needs a secret"):
        poseidon.connect(tls="on", master_port=free_port())
    with pytest.raises(InvalidArgument, match="tls=on needs a secret"):
        _core.Server.listen(options.resolve(tls="on").core(), 0)


@needs_openssl
def test_ucx_has_none() -> None:
    with pytest.raises(InvalidArgument, match="transport=ucx"):
        poseidon.connect(tls="on", secret=SECRET, transport="ucx", master_port=free_port())


@pytest.mark.skipif(_core.tls_available(), reason="this build has OpenSSL")
def test_a_build_without_openssl_says_so() -> None:
    with pytest.raises(InvalidArgument, match="no OpenSSL"):
        poseidon.connect(tls="on", secret=SECRET, master_port=free_port())


def test_it_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSEIDON_TLS", raising=False)
    assert options.resolve().tls == "off"
    monkeypatch.setenv("POSEIDON_TLS", "on")
    assert options.resolve().core().tls == "on"
    monkeypatch.setenv("POSEIDON_TLS", "yes")
    with pytest.raises(InvalidArgument, match="POSEIDON_TLS is 'yes'"):
        options.resolve()
