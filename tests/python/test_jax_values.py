"""poseidon.jax: values that all ranks share, random keys and modules, memory that is used again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import workers
from page_programs import output_on_two, programs
from poseidon.launch import free_port
from waiting import end

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("flax")
pytest.importorskip("optax")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Each of two ranks' answers to all cases."""
    port, command = free_port(), [sys.executable, str(Path(__file__).with_name("jax_values.py"))]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **workers.job_variables(rank, 2, port), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        end(*processes)
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output) for output in outputs]


def test_all_reduce_of_every_type_and_operation(found: list[dict[str, Any]]) -> None:
    assert [one["types_and_operations"] for one in found] == [[], []]


def test_a_loss_with_statistics_of_all_batches_has_the_gradients_of_one_process(found: list[dict[str, Any]]) -> None:
    assert max(one["under_value_and_grad"] for one in found) < 1e-6


def test_all_reduce_keeps_its_place_among_gradients_in_loops_and_branches(found: list[dict[str, Any]]) -> None:
    first, second = (one["in_loops"] for one in found)
    assert first == second
    assert all(first)


def test_optimizers_that_look_at_the_loss_train_as_one_process(found: list[dict[str, Any]]) -> None:
    first, second = (one["plateau"] for one in found)
    assert first == second
    assert max(first) < 1e-4


def test_a_program_that_has_disabled_jit_trains_alike(found: list[dict[str, Any]]) -> None:
    assert max(one["not_compiled"] for one in found) < 1e-6


def test_keys_and_modules_are_broadcast(found: list[dict[str, Any]]) -> None:
    first, second = (one["keys_and_modules"] for one in found)
    assert first == second
    assert first[1:3] == [1, True]


def test_what_cannot_be_reduced_or_trained_is_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        texts = one["refusals"]
        parts = (
            "pass one of mean",
            "numbers and arrays",
            "convert it",
            "pass their parts",
            "nnx.split",
            "different tree",
        )
        assert all(part in text for part, text in zip(parts, texts, strict=True)), texts
        assert "changed .norm.mean" in one["flax_statistics"]
        assert "docs/jax.md#flax-nnx-and-equinox" in one["flax_statistics"]


def test_donated_and_refilled_memory_trains_alike(found: list[dict[str, Any]]) -> None:
    assert max(one["memory_used_again"] for one in found) == 0


def test_the_recipes_of_the_page_leave_equal_replicas(tmp_path: Path) -> None:
    pytest.importorskip("equinox")
    recipes = programs("jax.md")[1:]
    assert len(recipes) == 3
    for recipe in recipes:
        program = tmp_path / "program.py"
        program.write_text(recipe, encoding="utf-8")
        texts = output_on_two(program).replace("[1] ", "").split("trained:")[1:]
        words = [text.replace("[", " ").replace("]", " ").split() for text in texts]
        assert words[0] == words[1]
        assert all(float(word) for word in words[0]), "no statistic is 0"
