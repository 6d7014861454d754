"""The TensorFlow adapter: every rank runs `tensorflow_cases.py`, several cases in one job."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

import workers
from page_programs import ROOT, first_program, output_on_two
from poseidon.adapter.run_record import load_run
from poseidon.planner import read_run, what_if
from tensorflow_jobs import TIMEOUT_S, answers

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("tensorflow")

TOGETHER = (
    "fits",
    "optimizers",
    "factors",
    "automatic",
    "embeddings",
    "several_steps_at_once",
    "loops",
    "applied_twice",
    "unused_on_one_rank",
    "loss_scale",
    "averages",
    "values_of_all",
    "statistics_in_the_loss",
    "callbacks_decide",
    "saves",
    "refusals",
)
REPLICAS = workers.__file__.replace("workers.py", "tensorflow_replicas.py")


def test_steps_of_fit_are_recorded(tmp_path: Path) -> None:
    first, second = answers(2, "many_steps", POSEIDON_RECORD=str(tmp_path))
    assert first["many_steps"] == second["many_steps"] == 20
    records = load_run(tmp_path)
    assert [(one.framework, one.first_step, len(one.steps)) for one in records] == [("tensorflow", 5, 10)] * 2
    names = [row.layer for row in records[0].plan]
    assert sorted(name.rpartition("/")[2] for name in names) == ["bias", "bias", "kernel", "kernel"]
    assert what_if(read_run(records), []).changes


@pytest.fixture(scope="module")
def together() -> list[dict[str, Any]]:
    return answers(2, *TOGETHER)


# What is compared with one process is compared by the cases themselves.
@pytest.mark.parametrize("case", ["fits", "optimizers", "embeddings", "several_steps_at_once", "loops"])
def test_all_ranks_have_the_parameters_of_one_process(together: list[dict[str, Any]], case: str) -> None:
    assert together[0][case] == together[1][case]


def test_kernels_of_dense_layers_take_factors(together: list[dict[str, Any]]) -> None:
    first, second = (answer["factors"] for answer in together)
    assert first == second
    assert ["sfb", 16] in first["used"]


def test_auto_takes_factors_where_they_are_fewer_bytes(together: list[dict[str, Any]]) -> None:
    first, second = (answer["automatic"] for answer in together)
    assert first == second
    assert first[:-1] == ["sfb", "ps", "ps", "ps"]


def test_a_variable_is_trained_twice_in_one_graph(together: list[dict[str, Any]]) -> None:
    # means 1.5 and 15 with momentum 0.5: -1.5, then -(0.5 * 1.5 + 15)
    assert [answer["applied_twice"] for answer in together] == [[-17.25]] * 2


def test_a_rank_without_a_gradient_counts_as_zeros(together: list[dict[str, Any]]) -> None:
    for answer in together:
        assert answer["unused_on_one_rank"] == [[[-1, -1], [-3, -3]]] * 2


def test_all_ranks_leave_out_a_step_that_is_not_finite_on_one(together: list[dict[str, Any]]) -> None:
    for answer in together:
        assert answer["loss_scale"] == {"value": [0.75, 0.75], "scale": 2.0}


def test_metrics_are_averaged_before_later_callbacks_see_them(together: list[dict[str, Any]]) -> None:
    first, second = (answer["averages"] for answer in together)
    assert first == second
    assert first["seen"] == first["history"]["loss"]


def test_all_reduce_of_every_type_and_operation(together: list[dict[str, Any]]) -> None:
    for answer in together:
        assert answer["values_of_all"] == []
        assert answer["statistics_in_the_loss"] < 1e-5


def test_callbacks_that_decide_by_a_metric_decide_the_same_on_all_ranks(together: list[dict[str, Any]]) -> None:
    first, second = (answer["callbacks_decide"] for answer in together)
    assert first == second
    assert len(first["history"]["val_loss"]) < 12, "it has stopped early"


@pytest.mark.parametrize("compiler", [{}, {"CXX": "/no/compiler"}])
def test_a_rank_with_fewer_batches_ends_the_job_at_the_end_of_its_epoch(compiler: dict[str, str]) -> None:
    began = time.monotonic()
    for answer in answers(2, "uneven", **compiler):
        assert "rank 1 has come to the end of an epoch after 3 training steps" in answer["uneven"]
        assert "give all ranks the same number of batches" in answer["uneven"]
    assert time.monotonic() - began < 0.8 * TIMEOUT_S


def test_saved_models_and_refusals(together: list[dict[str, Any]]) -> None:
    for answer in together:
        assert answer["saves"] is answer["refusals"] is None


def test_four_workers_train_a_cnn_as_one_process_and_send_what_was_planned() -> None:
    found = [
        answer["convolutions"]
        for answer in answers(4, "convolutions", POSEIDON_TRANSPORT="tcp", POSEIDON_SMALL_BYTES="0")
    ]
    assert len({answer["digest"] for answer in found}) == 1
    for answer in found:
        assert answer["steps"] == [4]
        assert answer["plan"] == ["kernel", "bias"] * 3
        # Headers, and small tensors that do not divide evenly among the workers.
        assert answer["sent"] == pytest.approx(answer["planned"], rel=0.15)
        assert answer["told"] == answer["sent"]


def test_without_a_compiler_training_gives_the_same_parameters() -> None:
    with_plugin = answers(2, "fits", "loops", "unused_on_one_rank")
    without = answers(2, "fits", "loops", "unused_on_one_rank", CXX="/no/compiler")
    assert with_plugin == without


def test_a_rank_that_makes_fewer_steps_is_told_of_at_once() -> None:
    began = time.monotonic()
    first, _ = answers(2, "one_leaves")
    assert "rank 1" in first["one_leaves"]
    assert time.monotonic() - began < workers.JOB_TIMEOUT_S + 15


def test_variables_that_one_rank_has_changed_end_the_job() -> None:
    found = answers(2, "two_in_one_graph", "drifting", script=REPLICAS, POSEIDON_REPLICA_CHECK="1")
    assert found[0]["two_in_one_graph"] == found[1]["two_in_one_graph"]
    for answer in found:
        assert len(answer["drifting"]) == 2
        for text in answer["drifting"]:
            assert "the replicas differ after step" in text
            assert "kernel" in text


def test_a_compiled_step_holds_no_address_of_this_process() -> None:
    """A program may be stored, and loaded by another process."""
    first, second = answers(2, "looks_in_program", script=REPLICAS)
    assert first == second
    assert set(first["looks_in_program"]) == {1}


@pytest.mark.parametrize("small_bytes", ["65536", "0"])
def test_xla_is_refused_by_name(small_bytes: str) -> None:
    for answer in answers(2, "compiled_by_xla", POSEIDON_SMALL_BYTES=small_bytes):
        assert "jit_compile" in answer["compiled_by_xla"]


def test_a_second_job_needs_a_step_that_is_compiled_again() -> None:
    first, second = answers(2, "another_job")
    assert first == second


def test_the_program_of_the_page_and_the_example(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(first_program("tensorflow.md"), encoding="utf-8")
    for path in (program, ROOT / "examples" / "keras_digits.py"):
        accuracies = re.findall(r"accuracy: ([0-9.]+)", output_on_two(path))
        assert len(accuracies) == 5
        assert float(accuracies[-1]) > 0.7


def test_variables_without_names_are_told_apart() -> None:
    import tensorflow as tf

    from poseidon.options import resolve
    from poseidon.tensorflow.variables import collect_variables

    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    layers = collect_variables(variables, [tf.constant([0.0])] * 2, None, None, resolve(rank=0, world_size=1))
    assert [layer.name for layer in layers[::-1]] == ["Variable:0", "Variable:0 (2)"]
