"""poseidon.jax: exactness, jit, scan and remat, and failures, in several processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import workers
from page_programs import ROOT, first_program, output_on_two
from poseidon.adapter.run_record import load_run
from poseidon.launch import free_port
from poseidon.live import WorkerFigures
from poseidon.planner import read_run, what_if
from poseidon.report import report_of_run
from waiting import end

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("jax")


def answers(case: str, world_size: int = 2, **environment: str) -> list[Any]:
    """Each rank's answer; None of one that has failed."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("jax_training.py")), case]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **workers.job_variables(rank, world_size, port), "JAX_PLATFORMS": "cpu", **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        end(*processes)
    return [json.loads(output) if output else None for output in outputs]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_the_means_in_rank_order_bit_by_bit(world_size: int) -> None:
    found = answers("exact", world_size)
    for answer in found:
        assert answer["equal"]
        assert answer["unwritten"]
        assert answer["params"] == found[0]["params"]


def test_steps_in_a_scan_with_remat_leave_equal_replicas() -> None:
    first, second = answers("scan", POSEIDON_REPLICA_CHECK="1")
    assert first == second
    assert first["b"] != [0.0, 0.0, 0.0]


def test_a_compiled_step_holds_no_address_of_this_process() -> None:
    """JAX stores programs, and another process finds them by their text."""
    first, second = answers("program")
    assert first == second
    assert "poseidon_look" in first


def test_kernels_of_dense_travel_as_factors() -> None:
    found = answers("factors", POSEIDON_TRANSPORT="tcp")
    for answer in found:
        assert answer["worst"] < 1e-6, "float32 sums in another order"
        assert answer["params"] == found[0]["params"]
        assert answer["moved"] == pytest.approx(1, rel=0.15), "the bytes of the plan, and headers of small messages"
        assert answer["schemes"] == {"['b']": "ps", "['w0']": "ps", "['w1']": "sfb", "['w2']": "ps"}
        assert answer["told"] == answer["schemes"]


@pytest.mark.parametrize(("wire", "factor_wire"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_factors_travel_in_a_format_of_their_own(wire: str, factor_wire: str) -> None:
    for answer in answers("rounded", POSEIDON_WIRE=wire, POSEIDON_FACTOR_WIRE=factor_wire):
        assert answer["schemes"]["['w1']"] == "sfb"
        assert (answer["w1"] > 1e-4) == (factor_wire == "bf16"), answer
        assert (answer["w2"] > 1e-4) == (wire == "bf16"), answer


def test_dense_is_an_ordinary_product_where_one_call_is_not_all() -> None:
    for worst in answers("factors_elsewhere"):
        assert max(worst.values()) < 1e-5, worst


def test_a_kernel_of_dense_that_is_used_elsewhere_is_refused() -> None:
    for text in answers("tied"):
        assert "parameter ['w1'] is the kernel of poseidon.jax.dense and is used elsewhere" in text


def test_two_calls_in_one_program_do_not_mix() -> None:
    assert answers("two_calls") == [True, True]


def test_calls_exchange_in_the_order_of_the_program_whatever_is_ready_first() -> None:
    first, second = answers("opposite_orders")
    assert first == second
    assert len(first) == 3
    assert all(first.values()), first


def test_a_parameter_that_a_loss_does_not_use_counts_as_zeros() -> None:
    assert answers("unused_on_one") == [{"all": [1.0, 1.0], "none": [0.0, 0.0], "one": [0.5, 0.5]}] * 2


def test_a_network_of_flax_with_optax_on_four_workers_equals_one_process() -> None:
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    found = answers("optax_and_flax", 4)
    for answer in found:
        assert answer["gap"] < 2e-4
        assert answer["params"] == found[0]["params"]


@pytest.mark.parametrize("option", [{"scheme": "topk"}, {"lossy": "topk"}])
def test_what_it_cannot_do_is_refused_in_one_sentence(option: dict[str, str]) -> None:
    from poseidon import jax as poseidon_jax

    with pytest.raises(poseidon_jax.PoseidonError, match=f"{next(iter(option))}=.* and poseidon.jax exclude"):
        poseidon_jax.init(rank=0, world_size=2, master_addr="127.0.0.1", master_port=29_999, **option)


def test_steps_are_watched_and_recorded_although_no_python_runs_in_them(tmp_path: Path) -> None:
    given = {"POSEIDON_RECORD": str(tmp_path), "POSEIDON_TRANSPORT": "tcp"}
    shown = [WorkerFigures.from_json(answer) for answer in answers("watched", **given)]
    assert [one.rank for one in shown] == [0, 1]
    assert shown[0].step == shown[1].step > 16, "ranks show the same steps"
    assert all(0.03 < one.step_s < 0.1 for one in shown)
    assert shown[0].stall_s > 0.015 > shown[1].stall_s, "rank 0 waits for rank 1"
    assert sorted(layer.name for layer in shown[0].layers) == [f"['{name}']" for name in ("b", "w0", "w1", "w2")]
    records = load_run(tmp_path)
    assert [(one.framework, one.first_step, len(one.steps)) for one in records] == [("jax", 5, 10)] * 2
    assert records[0].plan[0].layer == "['w0']", "in the order of forward"
    assert all(sum(layer.bytes for layer in step.layers) > 0 for one in records for step in one.steps)
    found = what_if(read_run(records), [])
    assert found.run.slow_host == "rank 1"
    assert found.run.step_s == pytest.approx(0.031, rel=0.3)
    assert not any("DistributedOptimizer" in one.words for one in found.changes), "it has none"
    assert report_of_run(records).step_s == pytest.approx(found.run.step_s, rel=0.1)


def test_several_devices_of_one_process_are_refused() -> None:
    for answer in answers("several_devices", XLA_FLAGS="--xla_force_host_platform_device_count=2"):
        assert answer["devices"] == 2
        assert "poseidon.jax, which exchanges the gradients of one device in each process" in answer["error"]


def test_a_lost_peer_ends_the_step_with_an_error() -> None:
    survivor, lost = answers("lost_peer")
    assert lost is None
    assert "lost rank 1" in survivor["error"]
    assert survivor["failure"] == "PeerLost"


def test_parameters_that_one_rank_has_changed_end_the_job() -> None:
    for answer in answers("drifting", POSEIDON_REPLICA_CHECK="1"):
        assert answer["steps"] == 3
        assert "the replicas differ after step 3: parameter ['w1'] has not the same values" in answer["error"]
        assert "the replicas differ" in answer["failure"]


def test_different_models_are_refused() -> None:
    for answer in answers("different"):
        assert "different models" in answer["error"]
        assert answer["error"].startswith("Mismatch")


def test_the_program_of_the_page_and_the_example(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(first_program("jax.md"), encoding="utf-8")
    parameters = re.findall(r"\[-?[0-9][^\]]*\.[^\]]*\]", output_on_two(program))
    assert len(parameters) == 2
    assert parameters[0] == parameters[1], "both ranks have the same"
    accuracy = re.search(r"trained on ([0-9.]+)%", output_on_two(ROOT / "examples" / "jax_mlp.py"))
    assert accuracy is not None
    assert float(accuracy.group(1)) > 80


OTHER_JAX = """
import sys, jax, jax.extend.core, jax.interpreters.mlir
sys.modules["jax._src.effects"] = None
del jax._src.effects
import poseidon.jax
"""


def test_a_version_of_jax_with_other_effects_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_JAX], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "keeps its effects elsewhere" in done.stderr.splitlines()[-1]
    assert "docs/compatibility.md" in done.stderr.splitlines()[-1]
