"""Push, pull and push_pull on arrays: values, rules, handles and errors, in one to three processes."""

from __future__ import annotations

import array
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon
import workers
from poseidon.errors import Aborted, InvalidArgument, Mismatch, PoseidonError, ShutDown
from poseidon.launch import free_port
from rule_reference import RULES, Reference
from waiting import wait_until

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZES = [1, 2, 3]
STEPS = 4


def run(world_size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Each rank's result of `case(port, *args)`."""
    return workers.run(world_size, case, free_port(), *args)


def joined(port: int, **options: Any) -> poseidon.Exchange:
    """Chunks are small, so that arrays of a few KB lie on all servers."""
    return poseidon.connect(**{"master_port": port, "chunk_bytes": 1024, "timeout": 20, **options})


def own(exchange: poseidon.Exchange, shape: tuple[int, ...], dtype: str, step: int = 0) -> np.ndarray:
    """What this rank contributes: small whole numbers, whose sums are exact in every dtype."""
    return part_of(exchange.rank, shape, dtype, step)


def part_of(rank: int, shape: tuple[int, ...], dtype: str, step: int = 0) -> np.ndarray:
    return np.random.default_rng((rank, step)).integers(0, 16, shape).astype(dtype)


def total(exchange: poseidon.Exchange, shape: tuple[int, ...], dtype: str, step: int = 0) -> np.ndarray:
    return sum(part_of(rank, shape, dtype, step) for rank in range(exchange.world_size))  # type: ignore[return-value]


def values(port: int) -> None:
    with joined(port) as exchange:
        declared = {name: own(exchange, (37, 20), name) for name in ("float32", "float64", "float16", "uint8", "int64")}
        declared["empty"] = np.zeros((0, 3), "float32")
        declared["scalar"] = own(exchange, (), "float32")
        exchange.declare(declared)
        for name, mine in declared.items():
            held = np.full_like(mine, 99)
            exchange.pull(name, out=held)
            assert np.array_equal(held, part_of(0, mine.shape, mine.dtype.name)), name
            before = mine.copy()
            exchange.push_pull(name, mine, out=held, average=False)
            summed = total(exchange, mine.shape, mine.dtype.name)
            assert np.array_equal(held, summed), name
            assert np.array_equal(mine, before), name
            again = np.zeros_like(mine)
            exchange.pull(name, again)
            assert np.array_equal(again, summed), name
        exchange.push_pull("float32", declared["float32"])
        mean = total(exchange, (37, 20), "float32") / np.float32(exchange.world_size)
        assert np.allclose(declared["float32"], mean, rtol=1e-6)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_values(world_size: int) -> None:
    run(world_size, values)


def rounded_values(port: int, wire: str, exact_below: int) -> None:
    """Whole numbers below `exact_below` travel exactly in this format; others are rounded, and only on their way."""
    with joined(port, wire=wire) as exchange:
        small = own(exchange, (300,), "float32")
        large = small + np.float32(exact_below) + np.float32(1 / 3)
        exchange.declare({"small": np.zeros_like(small), "large": np.zeros_like(large), "wide": np.zeros(300)})
        before, out = large.copy(), np.zeros_like(large)
        exchange.push_pull("small", small, out=out, average=False)
        assert np.array_equal(out, total(exchange, (300,), "float32"))
        exchange.push_pull("large", large, out=out, average=False)
        assert np.array_equal(large, before)
        exact = total(exchange, (300,), "float32") + exchange.world_size * (exact_below + 1 / 3)
        assert np.allclose(out, exact, rtol=1 / exact_below)
        assert exchange.world_size == 1 or not np.allclose(out, exact, rtol=1e-6)
        wide = np.full(300, 1 / 3)
        exchange.push_pull("wide", wide)
        assert np.allclose(wide, 1 / 3, rtol=1e-12)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("wire", "exact_below"), [("bf16", 256), ("fp16", 2048)])
def test_fewer_bits_on_the_way(world_size: int, wire: str, exact_below: int) -> None:
    run(world_size, rounded_values, wire, exact_below)


def many_keys(port: int) -> None:
    shape = (300,)
    with joined(port) as exchange:
        names = [f"layer {i}" for i in range(20)]
        exchange.declare({name: np.zeros(shape, "float32") for name in names})
        given = {name: own(exchange, shape, "float32", step) for step, name in enumerate(names)}
        expected = [total(exchange, shape, "float32", step) for step in range(len(names))]
        out = [np.zeros(shape, "float32") for _ in names]
        exchange.push_pull(given, out=out, average=False)
        assert all(map(np.array_equal, out, expected))
        exchange.push(names, [array * 2 for array in given.values()], average=False)
        held = {name: np.zeros(shape, "float32") for name in reversed(names)}
        exchange.pull(held)
        assert all(np.array_equal(held[name], 2 * sums) for name, sums in zip(names, expected, strict=True))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_many_keys_in_one_call(world_size: int) -> None:
    run(world_size, many_keys)


def asynchronous(port: int) -> None:
    shape = (5000,)
    with joined(port) as exchange:
        exchange.declare({"a": np.zeros(shape), "b": np.zeros(shape)})
        mine, out = own(exchange, shape, "float64"), np.zeros(shape)
        expected = total(exchange, shape, "float64")
        if exchange.rank == 0:
            first = exchange.push_pull("a", mine, out=out, average=False, sync=False)
            assert not first.done  # rank 1 has not contributed
            with pytest.raises(InvalidArgument, match="'a' has an operation under way"):
                exchange.push_pull(["b", "a"], [mine.copy(), mine])
            other = exchange.pull("b", np.zeros(shape), sync=False)  # nor was "b" started by that call
            other.wait()
            exchange.barrier()
        else:
            exchange.barrier()
            first = exchange.push("a", mine, average=False, sync=False)
            exchange.pull("b", np.zeros(shape))
        first.wait()
        first.wait()
        assert first.done
        assert exchange.rank != 0 or np.array_equal(out, expected)
        for step in range(20):  # a handle that nobody waits for does not keep its key
            late = exchange.push("a", own(exchange, shape, "float64", step), average=False, sync=False)
            deadline = time.monotonic() + 10
            while not late.done:
                assert time.monotonic() < deadline
        exchange.push_pull("b", out, sync=False)
        exchange.wait_all()
        exchange.pull("a", out)
        assert np.array_equal(out, total(exchange, shape, "float64", 19))


def rules_that_need_all_gradients(port: int, consistency: str) -> None:
    with joined(port, consistency=consistency) as exchange:
        exchange.declare({"w": np.ones(10)})
        for kind in ("adam", "adamw"):
            with pytest.raises(InvalidArgument, match=f"update rule {kind} and consistency={consistency} exclude"):
                exchange.set_rule("w", poseidon.UpdateRule(kind))
        with pytest.raises(InvalidArgument, match=f"aggregator=median and consistency={consistency} exclude"):
            exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=0.1, aggregator="median"))
        exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=1.0))
        exchange.push("w", np.ones(10))
        exchange.barrier()
        value = np.ones(10)
        exchange.pull("w", value)
        assert np.array_equal(value, np.zeros(10))


@pytest.mark.parametrize("consistency", ["ssp", "async"])
def test_rules_that_scale_need_the_gradients_of_all_ranks(consistency: str) -> None:
    """With them P updates by P-th parts of the gradient would go P times as far."""
    run(2, rules_that_need_all_gradients, consistency)


@pytest.mark.parametrize("world_size", [2, 3])
def test_asynchronous(world_size: int) -> None:
    run(world_size, asynchronous)


def from_threads(port: int) -> None:
    with joined(port) as exchange:
        names = [f"key {i}" for i in range(4)]
        exchange.declare({name: np.zeros(2000, "float32") for name in names})

        def work(name: str) -> bool:
            held = np.zeros(2000, "float32")
            for step in range(25):
                exchange.push_pull(name, own(exchange, held.shape, "float32", step), out=held, average=False)
                if not np.array_equal(held, total(exchange, held.shape, "float32", step)):
                    return False
            return True

        with ThreadPoolExecutor(len(names)) as pool:
            assert all(pool.map(work, names))


def test_threads_use_different_keys_at_once() -> None:
    run(2, from_threads)


def updates(port: int) -> None:
    shape = (23, 41)
    begin = np.random.default_rng(7).normal(size=shape)
    with joined(port) as exchange:
        references = {name: Reference(name, begin) for name in RULES}
        cut = [name for name in RULES if name != "lamb"]
        exchange.declare(dict.fromkeys(cut, begin))
        exchange.declare({"lamb": begin}, whole=True)
        for name, rule in RULES.items():
            exchange.set_rule(name, poseidon.UpdateRule(name.partition(" ")[0], **rule))
        parameters = {name: np.zeros(shape) for name in RULES}
        for step in range(STEPS):
            parts = [np.random.default_rng((rank, step)).normal(size=shape) for rank in range(exchange.world_size)]
            gradients = dict.fromkeys(RULES, parts[exchange.rank])
            if step % 2:
                exchange.push(gradients)
                exchange.pull(parameters)
            else:
                exchange.push_pull(gradients, out=parameters)
            for name, reference in references.items():
                expected = reference.step(sum(parts) / exchange.world_size)
                np.testing.assert_allclose(parameters[name], expected, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_servers_update_as_the_rules_say(world_size: int) -> None:
    run(world_size, updates)


def rule_changes(port: int) -> None:
    with joined(port) as exchange:
        exchange.declare({"w": np.ones(1000)})
        out, gradient = np.zeros(1000), np.ones(1000)
        for lr, expected in ((0.5, 0.5), (0.25, 0.25)):
            exchange.set_rule("w", poseidon.UpdateRule("sgd", lr=lr))
            exchange.push_pull("w", gradient, out=out)
            assert np.all(out == expected)
        exchange.set_rule("w", poseidon.UpdateRule("none"))
        exchange.push_pull("w", gradient * 3, out=out)
        assert np.all(out == 3)


def test_a_rule_holds_from_the_next_step_on() -> None:
    run(2, rule_changes)


def kinds_of_arrays(port: int) -> None:
    import torch

    with joined(port, world_size=1, rank=0) as exchange:
        exchange.declare({"d": array.array("d", [1, 2, 3]), "u": b"\x05\x06"})
        doubles, octets = array.array("d", [0, 0, 0]), bytearray(2)
        exchange.pull(["d", "u"], out=(doubles, octets))
        assert list(doubles) == [1, 2, 3]
        assert octets == b"\x05\x06"
        read_only = np.array([4.0, 5.0, 6.0])
        read_only.flags.writeable = False
        tensor = torch.zeros(3, dtype=torch.float64)
        exchange.push_pull("d", read_only, out=tensor)
        assert tensor.tolist() == [4, 5, 6]
        exchange.push_pull("d", tensor * 2, out=memoryview(doubles))
        assert list(doubles) == [8, 10, 12]


def test_arrays_of_every_kind() -> None:
    run(1, kinds_of_arrays)


class OnDevice:
    """What says by DLPack that it lies in the memory of a CUDA device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self) -> object:
        raise AssertionError("its memory was asked for")


def refusals(port: int) -> None:
    import torch

    with joined(port) as exchange:
        good = np.zeros((4, 6), "float32")
        exchange.declare({"w": good, "n": np.zeros(3, "int32"), "m": np.zeros(24, "float32")})
        backwards = good.astype(">f4")
        locked = good.copy()
        locked.flags.writeable = False
        leaf = torch.zeros(4, 6, requires_grad=True)
        memory = np.zeros(100, "float32")
        lamb = poseidon.UpdateRule("lamb", lr=0.1)
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("there is no key 'v'.*declared: w, n", lambda: exchange.push("v", good)),
            (
                "float32 of shape .4, 6., and the given array is float32 of shape .6, 4.",
                lambda: exchange.push("w", good.reshape(6, 4)),
            ),
            ("the given array is float64", lambda: exchange.pull("w", good.astype("float64"))),
            ("must be one of float32", lambda: exchange.push("w", good.astype("complex64"))),
            ("must be one of float32", lambda: exchange.push("w", backwards)),
            ("not contiguous", lambda: exchange.push("w", np.zeros((6, 4), "float32").T)),
            ("is read-only", lambda: exchange.push_pull("w", locked)),
            ("is read-only", lambda: exchange.pull("w", locked)),
            ("is a negative view.*resolve_neg", lambda: exchange.push_pull("w", torch._neg_view(torch.ones(4, 6)))),
            ("the Tensor for key 'w' is no array", lambda: exchange.push("w", leaf)),
            ("is on a device", lambda: exchange.push("w", OnDevice())),
            ("the list for key 'w' is no array", lambda: exchange.push("w", [[0.0] * 6] * 4)),
            ("overlap", lambda: exchange.push_pull("w", memory[:24].reshape(4, 6), memory[6:30].reshape(4, 6))),
            ("keys 'w' and 'm' overlap", lambda: exchange.pull(["w", "m"], (memory[:24].reshape(4, 6), memory[20:44]))),
            (
                "keys 'w' and 'm' overlap",
                lambda: exchange.push_pull({"w": good, "m": memory[:24]}, out={"w": good + 1, "m": good.reshape(24)}),
            ),
            ("has no mean: pass average=False", lambda: exchange.push("n", np.zeros(3, "int32"))),
            ("must be a list of 2 arrays", lambda: exchange.push(["w", "n"], [good])),
            ("must have the keys w", lambda: exchange.push_pull({"w": good}, out={"n": good})),
            ("were given twice: leave out", lambda: exchange.push({"w": good}, good)),
            ("a key was given twice", lambda: exchange.push(["w", "w"], [good, good])),
            ("'w' was declared before", lambda: exchange.declare({"w": good})),
            ("'' is no key", lambda: exchange.declare({"": good})),
            ("lies whole on one server", lambda: exchange.set_rule("w", lamb)),
            ("a rule needs float32 or float64", lambda: exchange.set_rule("n", poseidon.UpdateRule("sgd", lr=1))),
            (
                "needs a floating-point type",
                lambda: exchange.set_rule("n", poseidon.UpdateRule("none", aggregator="median")),
            ),
            ("lower-case letters", lambda: poseidon.UpdateRule("none", aggregator="Median of all")),
        ]
        if exchange.world_size == 1:
            wrong = [case for case in wrong if "mean" not in case[0]]
        for text, call in wrong:
            with pytest.raises(InvalidArgument, match=text):
                call()
        exchange.push({"w": good, "m": good.reshape(24)})  # both are only read
        exchange.push_pull("w", good + 1, out=good)  # none of it has done any harm
        assert np.all(good == 1)
    exchange.close()
    for call in (lambda: exchange.push("w", good), exchange.barrier, lambda: exchange.declare({"x": good})):
        with pytest.raises(ShutDown, match="closed"):
            call()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_does_not_fit_is_refused_before_anything_is_sent(world_size: int) -> None:
    run(world_size, refusals)


def urgency(port: int) -> bool:
    with joined(port, transport="tcp", chunk_bytes=1 << 18) as exchange:
        bulk = {f"bulk {i}": np.full(4 << 20, exchange.rank, "float32") for i in range(4)}
        urgent = {"urgent": np.full(1000, exchange.rank, "float32")}
        exchange.declare({**bulk, **urgent})
        exchange.set_urgency({**dict.fromkeys(bulk, 0.0), "urgent": 1.0})
        for wrong in ({"urgent": 1.5}, {"urgent": math.nan}):
            with pytest.raises(InvalidArgument, match="urgency"):
                exchange.set_urgency(wrong)
        with pytest.raises(InvalidArgument, match="no key"):
            exchange.set_urgency({"nobody": 1.0})
        exchange.barrier()
        slow = exchange.push_pull(bulk, sync=False)
        exchange.push_pull(urgent)
        overtook = not slow.done
        slow.wait()
        mean = (exchange.world_size - 1) / 2
        assert all(np.all(array == mean) for array in (*bulk.values(), *urgent.values()))
        return overtook


def test_what_is_urgent_overtakes() -> None:
    assert all(run(2, urgency))


def fails(port: int, failing_rank: int) -> str:
    try:
        with joined(port) as exchange:
            exchange.declare({"w": np.zeros(10)})
            if exchange.rank == failing_rank:
                raise ZeroDivisionError("oh no")
            handle = exchange.push("w", np.zeros(10), sync=False)
            if exchange.rank == 0:  # one rank asks, the other waits
                wait_until(lambda: handle.done, "the failure")
            handle.wait()
    except (PoseidonError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def test_an_exception_in_the_block_ends_the_other_ranks_with_its_text() -> None:
    answers = run(3, fails, 1)
    assert answers[1] == "ZeroDivisionError: oh no"
    for rank in (0, 2):
        assert answers[rank].startswith(Aborted.__name__)
        assert "rank 1 failed: ZeroDivisionError: oh no" in answers[rank]


def disagrees(port: int) -> None:
    with pytest.raises(Mismatch, match="differs from that of rank"), joined(port) as exchange:
        exchange.declare({"w": np.zeros(10 + exchange.rank)})


def test_ranks_that_declare_different_arrays_are_told() -> None:
    run(2, disagrees)


def test_alone_and_without_pytorch() -> None:
    program = (
        "import sys, poseidon\n"
        "assert not {'numpy', 'poseidon._core'} & set(sys.modules)\n"
        "import numpy as np\n"
        "exchange = poseidon.connect()\n"
        "exchange.declare({'w': np.ones(3)})\n"
        "out = np.zeros(3)\n"
        "exchange.push('w', out + 5).wait()\n"
        "exchange.pull('w', out)\n"
        "assert 'torch' not in sys.modules\n"
        "print(exchange.rank, exchange.world_size, out.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "0 1 [5.0, 5.0, 5.0]\n"), done.stderr


def test_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        poseidon.conect  # noqa: B018


def program_of_the_page() -> str:
    page = (ROOT / "docs" / "push-pull.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def run_script(world_size: int, *command: str) -> str:
    launcher = [sys.executable, "-m", "poseidon", "run", "-n", str(world_size), *command]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_of_the_page(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program_of_the_page(), encoding="utf-8")
    velocity, parameter = 0.0, 0.0
    for _ in range(10):
        velocity = 0.9 * velocity + 1
        parameter -= 0.1 * velocity
    text = run_script(2, str(script))
    for rank in range(2):
        assert f"rank {rank} of 2: {parameter:.4f}" in text


def test_the_example_learns() -> None:
    text = run_script(3, str(ROOT / "examples" / "push_pull.py"), "--steps", "41")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 4


def waits_for_a_new_thread(port: int) -> float:
    """Each rank waits for one key, and a thread that has not called before pushes the other one after 6 s."""
    with joined(port) as exchange:
        exchange.declare({key: np.zeros(4, "float32") for key in "ab"})
        mine, other = ("a", "b") if exchange.rank == 0 else ("b", "a")

        def push_later() -> None:
            time.sleep(6)  # Ranks that wait for each other would be told by then
            exchange.push(other, np.ones(4, "float32"))

        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(push_later)
            out = np.ones(4, "float32")
            exchange.push_pull(mine, out)
            later.result()
        return float(out.sum())


def test_a_thread_that_has_not_called_yet_may_end_the_wait_of_all_ranks() -> None:
    assert run(2, waits_for_a_new_thread) == [4.0, 4.0]
