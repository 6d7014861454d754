"""Servers that are killed and begin again from what they had saved, with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW

import poseidon
import poseidon.torch as torch_poseidon
import workers
from poseidon.errors import InvalidArgument, PeerLost, PoseidonError
from poseidon.launch import free_port
from server_process import server_process
from test_torch_server_update import Model, Spec, assert_same_bits, assert_same_state, optimizer_of, step_once
from torch_cases import all_equal, parameters_digest
from waiting import SLOWED, compute_for, end, wait_until

_core = pytest.importorskip("poseidon._core", reason="the compiled core is not built")
EVERY = 5


def arguments(directory: Path, *more: str) -> list[str]:
    return ["--checkpoint-dir", str(directory), "--checkpoint-every", str(EVERY), *more]


def complete_versions(directory: Path) -> list[int]:
    return [one.version for one in _core.list_checkpoints(str(directory), True) if one.complete]


def wait_for(directory: Path, version: int) -> None:
    wait_until(
        lambda: max(complete_versions(directory), default=0) >= version,
        lambda: f"version {version}, there are {complete_versions(directory)}",
    )


def exchanged(port: int, addresses: list[str], directory: Path | None, first: int, last: int) -> tuple[int, bytes]:
    """Steps `first` to `last` of a training on arrays; the version that it went on from, and the parameters.

    Resumes and waits for each version where there is a directory: a server skips one that comes before the last is
    written.
    """
    parameters = {"w": np.linspace(-1, 1, 30_000, dtype="float32"), "b": np.ones(7)}
    with poseidon.connect(servers=addresses, master_port=port, chunk_bytes=4096, timeout=20 * SLOWED) as exchange:
        version = exchange.declare(parameters, resume=directory is not None)
        exchange.set_rule(["w", "b"], poseidon.UpdateRule("sgd", lr=0.1, momentum=0.9))
        exchange.pull(parameters)
        for step in range(first, last + 1):
            draw = np.random.default_rng((exchange.rank, step))
            gradients = {name: draw.standard_normal(one.shape).astype(one.dtype) for name, one in parameters.items()}
            exchange.push_pull(gradients, out=list(parameters.values()))
            if directory is not None and step % EVERY == 0:
                wait_for(directory, step)
                time.sleep(0.2)  # the server hears of it after the file is there, and tells nobody
    return version, b"".join(one.tobytes() for one in parameters.values())


@pytest.mark.parametrize("server_count", [1, 2])
def test_a_killed_server_goes_on_where_its_checkpoint_was(tmp_path: Path, server_count: int) -> None:
    def run(addresses: list[str], first: int, last: int, directory: Path | None = tmp_path) -> tuple[int, bytes]:
        answers = workers.run(2, exchanged, free_port(), addresses, directory, first, last)
        assert answers[0] == answers[1]
        return answers[0]

    with server_process() as (_, address):
        _, straight = run([address], 1, 15, None)
    with server_process(*arguments(tmp_path)) as (process, address):
        assert run([address], 1, 12)[0] == 0
        end(process)
    several_cores = server_process(*arguments(tmp_path, "--server-cores", "3"))
    with several_cores as (_, address), server_process(*arguments(tmp_path)) as (_, other):
        version, parameters = run([address, other][:server_count], 11, 15)
        assert (version, parameters) == (10, straight)
    assert complete_versions(tmp_path) == [15, 10]


def test_a_rule_of_another_kind_takes_none_of_the_saved_states(tmp_path: Path) -> None:
    values, gradient = np.ones(1000), np.linspace(-1, 1, 1000)

    def run(address: str, rule: poseidon.UpdateRule, step_count: int) -> tuple[int, np.ndarray]:
        """The version that it went on from, and its values."""
        with poseidon.connect(servers=[address], master_port=free_port(), world_size=1, rank=0) as exchange:
            version = exchange.declare({"w": values}, resume=True)
            exchange.pull("w", out=values)
            before = values.copy()
            exchange.set_rule("w", rule)
            for _ in range(step_count):
                exchange.push_pull("w", gradient, out=values)
            wait_for(tmp_path, version + step_count // EVERY * EVERY)
        return version, before

    with server_process(*arguments(tmp_path)) as (_, address):
        run(address, poseidon.UpdateRule("adam", lr=0.1), EVERY)
    with server_process(*arguments(tmp_path)) as (_, address):
        momentum = poseidon.UpdateRule("sgd", lr=0.1, momentum=0.9, dampening=0.5)
        version, before = run(address, momentum, 1)
    assert version == EVERY
    np.testing.assert_allclose(values, before - 0.1 * gradient, rtol=1e-12)


def push_for_ever(exchange: poseidon.Exchange, gradient: np.ndarray, counted: np.ndarray) -> None:
    while True:
        exchange.push_pull("count", gradient, out=counted)
        compute_for(0.01)


def until_lost(port: int, address: str) -> int:
    """Steps of a training that counts them, until the server is lost; the version that it went on from."""
    ones = np.ones(50_000, "float32")
    counted = np.zeros_like(ones)
    try:
        with poseidon.connect(servers=[address], master_port=port, chunk_bytes=4096, timeout=20 * SLOWED) as exchange:
            version = exchange.declare({"count": counted}, resume=True)
            exchange.pull("count", out=counted)
            assert np.all(counted == version)
            exchange.set_rule("count", poseidon.UpdateRule("sgd", lr=1.0, maximize=True))
            with pytest.raises(PeerLost, match="server"):
                push_for_ever(exchange, ones, counted)
    except PoseidonError:  # from close(), which says it again
        return version


def test_servers_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    delays = random.Random(5)
    reached = 0
    for _ in range(4):
        serving = server_process("--checkpoint-dir", str(tmp_path), "--checkpoint-every", "20", "--server-cores", "2")
        with serving as (process, address), ThreadPoolExecutor() as pool:
            running = pool.submit(workers.run, 2, until_lost, free_port(), address)
            wait_for(tmp_path, reached + 1)
            assert not wait([running], delays.uniform(0, 0.3)).done
            end(process)
            assert all_equal(versions := running.result())
        assert versions[0] >= reached
        reached = max(complete_versions(tmp_path))
    assert reached > 0


def test_a_job_does_not_start_anew_among_its_checkpoints(tmp_path: Path) -> None:
    with server_process(*arguments(tmp_path)) as (_, address):
        workers.run(2, exchanged, free_port(), [address], tmp_path, 1, EVERY)
        with pytest.raises(workers.WorkerError, match="resume from it"):
            workers.run(2, exchanged, free_port(), [address], None, 1, 1)


def trained(spec: Spec, first: int, last: int) -> tuple[int, str, Any]:
    """Like `exchanged`, with a model whose layers are not all used in every step; beside the optimizer itself."""
    straight = torch_poseidon.DistributedDataParallel(Model(), scheme="ps")
    straight_optimizer = optimizer_of(straight.module, spec)
    for step in range(1, first):
        step_once(straight, straight_optimizer, step)
    model = torch_poseidon.DistributedDataParallel(Model(), scheme="ps")
    optimizer = torch_poseidon.DistributedOptimizer(
        optimizer_of(model.module, spec), model, update="server", resume=True
    )
    assert isinstance(optimizer, torch_poseidon.DistributedOptimizer)
    assert_same_bits(model, straight)
    for step in range(first, last + 1):
        step_once(straight, straight_optimizer, step)
        step_once(model, optimizer, step)
    assert_same_bits(model, straight)
    assert_same_state(optimizer.state_dict(), straight_optimizer.state_dict())
    return optimizer.resumed_version, parameters_digest(model), None


@pytest.mark.parametrize("spec", [(SGD, {"lr": 0.02, "momentum": 0.9}), (AdamW, {"lr": 0.01})], ids=["sgd", "adamw"])
def test_an_optimizer_resumes_what_the_servers_have(tmp_path: Path, spec: Spec) -> None:
    options = {"chunk_bytes": 4096, "job": "model"}
    with server_process(*arguments(tmp_path)) as (process, address):
        answers = workers.run(2, trained, spec, 1, 7, servers=[address], **options)
        assert all_equal(answers)
        assert answers[0][0] == 0
        wait_for(tmp_path, 5)
        end(process)
    with server_process(*arguments(tmp_path)) as (_, address):
        answers = workers.run(2, trained, spec, 6, 10, servers=[address], **options)
        assert all_equal(answers)
        assert answers[0][0] == 5


def embedded(steps: int) -> tuple[int, str, str]:
    """The version that it went on from, and the parameters before and after some steps."""
    model = torch_poseidon.DistributedDataParallel(Model(), scheme="ps")
    inner = optimizer_of(model.module, (AdamW, {"lr": 0.01}))
    optimizer = torch_poseidon.DistributedOptimizer(inner, model, update="server", resume=True)
    before = parameters_digest(model)
    for step in range(steps):
        step_once(model, optimizer, step)
    return optimizer.resumed_version, before, parameters_digest(model)


def test_embedded_servers_share_a_directory(tmp_path: Path) -> None:
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 4, "job": "embedded"}
    first = workers.run(2, embedded, 4, **options)
    assert first[0][0] == 0
    wait_for(tmp_path, 4)
    second = workers.run(3, embedded, 1, **options)  # another number of servers, too
    assert all_equal(first)
    assert all_equal(second)
    assert second[0][:2] == (4, first[0][2])


def test_resume_is_for_servers() -> None:
    module = torch.nn.Linear(2, 2)
    torch_poseidon.init(rank=0, world_size=1)
    try:
        model = torch_poseidon.DistributedDataParallel(module)
        optimizer = SGD(module.parameters(), lr=0.1)
        with pytest.raises(InvalidArgument, match="load_state_dict"):
            torch_poseidon.DistributedOptimizer(optimizer, model, resume=True)
        alone = torch_poseidon.DistributedOptimizer(optimizer, model, update="server", resume=True)
        assert alone.resumed_version == 0
    finally:
        torch_poseidon.shutdown()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "poseidon", "checkpoint", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=60 * SLOWED, check=False)


def test_the_command_lists_and_checks(tmp_path: Path) -> None:
    with server_process(*arguments(tmp_path)) as (_, address):
        workers.run(2, exchanged, free_port(), [address], tmp_path, 1, 10)
    listed = json.loads(command("list", str(tmp_path), "--json").stdout)
    assert [(one["job"], one["version"], one["layers"], one["usable"]) for one in listed] == [
        ("default", 10, 2, True),
        ("default", 5, 2, True),
    ]
    assert command("check", str(tmp_path)).returncode == 0
    newest = max(tmp_path.glob("*.ckpt"))
    content = bytearray(newest.read_bytes())
    content[-100] ^= 1
    newest.write_bytes(content)
    done = command("check", str(tmp_path))
    assert done.returncode == 0  # the older one is whole
    assert "checksum" in done.stdout
    for path in tmp_path.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:-1])
    assert command("check", str(tmp_path)).returncode == 1
    missing = command("list", str(tmp_path / "none"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("poseidon: ")


def test_a_server_says_that_it_cannot_write_and_goes_on(tmp_path: Path) -> None:
    directory, said = tmp_path / "gone", tmp_path / "said"
    with (
        said.open("w") as errors,
        server_process(*arguments(directory), stderr=errors.fileno()) as (process, address),
    ):
        assert directory.is_dir()
        shutil.rmtree(directory)
        directory.write_text("in the way")
        answers = workers.run(2, exchanged_anyway, free_port(), [address])
        assert answers[0] == answers[1]
        expected = "poseidon server: checkpoint version 5 of job 'default' is lost, training goes on"
        wait_until(lambda: expected in said.read_text(), lambda: f"{expected!r} in {said.read_text()!r}")
        process.terminate()
        assert process.wait(timeout=20 * SLOWED) == 0


def test_a_server_ends_although_nobody_reads_what_it_says(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(1 << 12))
    os.set_blocking(write, True)
    try:
        with server_process(*arguments(directory), stderr=write) as (process, address):
            shutil.rmtree(directory)
            directory.write_text("in the way")
            workers.run(2, exchanged_anyway, free_port(), [address])
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)  # in which it looks for what there is to say, as it does once a second
            process.terminate()
            assert process.wait(timeout=10 * SLOWED) == 0
    finally:
        os.close(read)
        os.close(write)


def exchanged_anyway(port: int, addresses: list[str]) -> bytes:
    """A layer that nobody assigns: without an assignment no server looks for older versions."""
    out = np.zeros(100, "float32")
    with poseidon.connect(servers=addresses, master_port=port, timeout=20 * SLOWED) as exchange:
        client = exchange._client
        layer, _ = client.add_layers([_core.Layer("w", "float32", 100, scheme="ps", stored=True)])
        for _ in range(2 * EVERY):
            client.push_pull(layer, np.ones(100, "float32"), out, 2)
            client.wait(layer)
    return out.tobytes()


def test_a_wrong_directory_is_one_line() -> None:
    line = [sys.executable, "-m", "poseidon", "server", "--port", "7300", "--server-cores", "2", "--checkpoint-dir"]
    done = subprocess.run([*line, "/proc/none"], capture_output=True, text=True, timeout=60 * SLOWED, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("poseidon: checkpoint_dir: cannot write to /proc/none")
    assert done.stderr.endswith("; choose a folder in which this process may write\n"), "ports have no part in it"
    with pytest.raises(PoseidonError, match="checkpoint_dir"):
        poseidon.connect(rank=0, world_size=1, checkpoint_dir="/proc/none")
