"""Gradients of replays: the sample of real exponents, what is filled from it, and the reference of the coder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.gradients.bits import factor_bits, gradient_bits, vector_bits
from poseidon.gradients.coded_bits import BLOCK, FORMATS, as_words, coded_bits, difference_bits
from poseidon.gradients.exponents import SAMPLE, exponents, index, keys
from poseidon.gradients.fill import Stock, factor, with_exponents
from poseidon.gradients.layers import LayerGradients
from poseidon.models import MODELS, LayerSpec, ModelTable, model_table, scaled
from poseidon.models.table import distinct_rows

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gradients" / "sample.py"
HEAD = 3
GRADIENT_KINDS = sorted({key.rsplit("/", 1)[0] for key in index()["bits"]} & {key.rsplit("/", 1)[0] for key in keys()})


def block(*distances: int) -> NDArray[np.float32]:
    """A block of ones, but for numbers that are 2 to the minus of these."""
    values = np.ones(BLOCK, np.float32)
    values[: len(distances)] = 2.0 ** -np.array(distances, dtype=np.float32)
    return values


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (block(), HEAD + 3 * BLOCK),
        (block(2, 1), HEAD + 3 * BLOCK + BLOCK // 8 + 2),
        (block(*[2] * 200), HEAD + 3 * BLOCK + 2 * BLOCK // 8),
        (block(100, *[2] * 200), HEAD + 3 * BLOCK + 2 * BLOCK // 8 + 1),
        (np.zeros(BLOCK, np.float32), 1),
        (np.zeros(300 * BLOCK, np.float32), 4),
        (np.concatenate([np.zeros(BLOCK), block(), np.zeros(257 * BLOCK)]), 1 + HEAD + 3 * BLOCK + 3),
        (np.ones(7, np.float32), 28),
        (np.where(np.arange(BLOCK) % 3 == 0, 0, block()), HEAD + 3 * BLOCK + 2 * BLOCK // 8),
        (2.0 ** np.tile(np.arange(-120, 136, dtype=np.float32).clip(-120, 120), 1), 1 + 4 * BLOCK),
    ],
    ids=["equal", "escapes", "two-bits", "far", "zeros", "run", "mixed", "rest", "scattered-zeros", "plain"],
)
def test_coded_sizes_by_hand(values: NDArray[np.float32], size: int) -> None:
    assert coded_bits(values.astype(np.float32)) == 8 * size


def test_sixteen_bits_are_those_of_torch() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e-3
    for form, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(as_words(values, form), expected)
    assert coded_bits(block(), "bf16") == 8 * (HEAD + BLOCK)
    assert coded_bits(block(), "fp16") == 8 * (HEAD + BLOCK * 11 // 8)


def test_differences_are_those_of_the_core() -> None:
    base = np.full(BLOCK, 0.5, np.float32)
    near = np.nextafter(base, np.float32(1))
    assert difference_bits(base, base) == 8
    assert 2 * BLOCK <= difference_bits(near, base) <= 3 * BLOCK, "a sign, and that it is the smallest one"
    assert difference_bits(near, base, "bf16") == 8, "both are rounded to the same"
    with pytest.raises(InvalidArgument, match="different lengths"):
        _core.coded_difference_bytes(near, base[1:], "float32")
    with pytest.raises(InvalidArgument, match="no whole numbers"):
        _core.coded_bytes(np.zeros(7, np.uint8), "bfloat16")
    assert _core.coded_bytes(np.zeros(BLOCK), "float64") == 8 * BLOCK, "what is not coded takes what it has"
    assert _core.coded_bytes(np.zeros(4 + BLOCK, np.uint8), "int8_blocks") == 1 + 4, "a block, and what is left over"


def test_bits_of_layers_are_those_of_replayed_gradients() -> None:
    """Of one worker and of the mean of eight, whose signs and mantissas are drawn and not those of real workers."""
    for name, places in (("GPT-2", (3, -3)), ("ResNet-50", (50,)), ("Llama-134M", (0, 2))):
        whole = model_table(name)
        table = scaled(whole, 8)
        ranks = [LayerGradients(table, rank, whole) for rank in range(8)]
        for place in places:
            layer = whole.layers[place]
            drawn = [rank.weight(table.layers[place]) for rank in ranks]
            for form in ("fp32", "bf16"):
                for workers, values in ((1, drawn[0]), (8, np.mean(drawn, axis=0, dtype=np.float32))):
                    expected = gradient_bits(whole, layer, form, workers)
                    assert coded_bits(values, form) / values.size == pytest.approx(
                        expected, rel=0.25 if place == 0 else 0.03
                    ), name


def test_bits_of_vectors_and_factors() -> None:
    assert 27 < vector_bits(model_table("BERT-base"), "fp32") < 29
    vgg = model_table("VGG19")
    layer = next(layer for layer in vgg.layers if layer.name == "fc6")
    assert 15 < factor_bits(vgg, layer, "fp32") < 28, "half of what comes from a rectifier is zeros"


@pytest.mark.parametrize(("form", "bits"), [("fp32", (17.3, 18.7)), ("bf16", (2.5, 3.4))])
def test_a_step_of_adamw_changes_as_many_bits_as_in_training(form: str, bits: tuple[float, float]) -> None:
    """Dense layers of the sampled GPT with lr 1e-4 on 8 workers, steps 40 to 100: 19.7 to 19.9 and 3.9 to 4.0 bits."""
    whole = model_table("GPT-2")
    table = scaled(whole, 8)
    layer = next(layer for layer in table.layers if layer.name.endswith("mlp.c_fc"))
    ranks = [LayerGradients(table, rank, whole) for rank in range(8)]
    parameter = torch.nn.Parameter(torch.from_numpy(ranks[0].initial_weight(layer)))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4)
    for _ in range(40):
        before = parameter.detach().clone()
        parameter.grad = torch.from_numpy(np.mean([rank.weight(layer) for rank in ranks], axis=0))
        optimizer.step()
    moved = difference_bits(parameter.detach().numpy(), before.numpy(), form) / parameter.numel()
    assert bits[0] < moved < bits[1]


def test_parameters_begin_as_initialization_makes_them_on_all_ranks() -> None:
    whole = model_table("ResNet-50")
    table = scaled(whole, 8)
    layer = next(layer for layer in table.layers if layer.kind == "conv" and layer.weight_shape[2] == 3)
    wide = next(other for other in whole.layers if other.name == layer.name)
    first, other = (LayerGradients(table, rank, whole).initial_weight(layer) for rank in (0, 1))
    assert first.tobytes() == other.tobytes()
    assert first.std() == pytest.approx((2 / (wide.weight_shape[0] * 9)) ** 0.5, rel=0.05), "He's, of the whole layer"
    norm = next(layer for layer in table.layers if layer.kind == "norm")
    assert (LayerGradients(table, 0, whole).initial_weight(norm) == 1).all()
    lora = model_table("Llama-1B LoRA")
    factors = {one.name.rpartition(".")[2]: LayerGradients(lora, 0).initial_weight(one) for one in lora.layers[:2]}
    assert factors["lora_A"].any()
    assert not factors["lora_B"].any()


def test_the_sample_is_small_and_has_every_family_at_every_step() -> None:
    assert SAMPLE.stat().st_size <= 2_000_000
    kinds = {tuple(key.split("/")[:2]) for key in keys()}
    for family, some in {
        "cnn": "conv fc head vector fc.rows fc.outputs",
        "resnet": "conv head vector head.rows",
        "vit": "conv attention mlp positions vector head.outputs",
        "gpt": "embedding positions attention mlp head vector",
        "lora": "lora_a lora_b",
        "dlrm": "embedding mlp vector",
    }.items():
        assert {(family, kind) for kind in some.split()} <= kinds
    steps = index()["steps"]
    assert len(steps) >= 3
    assert max(steps) >= 200
    assert {(*kind, str(step)) for kind in kinds for step in steps} == {tuple(key.split("/")) for key in keys()}
    with pytest.raises(KeyError, match="no pooling at step 0"):
        exponents("gpt", "pooling", 0)


@pytest.mark.parametrize("name", GRADIENT_KINDS)
@pytest.mark.parametrize("rank", [0, 5])
def test_filled_gradients_have_the_samples_bits(name: str, rank: int) -> None:
    family, kind = name.split("/")
    worker, steps = rank % index()["workers"], index()["steps"][1:]
    sample = np.concatenate([exponents(family, kind, step)[worker] for step in steps])
    filled = Stock(family, kind, 1 << 19, rank).draw(1 << 19)
    real = with_exponents(sample, np.random.default_rng(0))
    for form in FORMATS:
        factor_up = np.float32(2.0**14 / np.abs(real).max()) if form == "fp16" else np.float32(1)
        bits = [coded_bits(values * factor_up, form) / values.size for values in (filled, real)]
        assert bits[0] == pytest.approx(bits[1], rel=0.02), form


def test_the_mean_over_ranks_has_the_bits_of_real_means() -> None:
    for name in ("gpt/attention", "gpt/mlp", "resnet/conv", "cnn/fc"):
        family, kind = name.split("/")
        mean = np.mean([Stock(family, kind, 1 << 18, rank).draw(1 << 18) for rank in range(8)], axis=0)
        real = np.mean([index()["bits"][f"{name}/{step}"]["mean fp32"] for step in index()["steps"][1:]])
        assert coded_bits(mean) / mean.size == pytest.approx(real, rel=0.03), name


def words(table: ModelTable, rank: int, whole: ModelTable) -> NDArray[np.float32]:
    return LayerGradients(table, rank, whole).weight(table.layers[0]).reshape(-1)


def touched(gradient: NDArray[np.float32], width: int) -> NDArray[np.bool_]:
    return gradient[: gradient.size // width * width].reshape(-1, width).any(axis=1)


@pytest.mark.parametrize("scale", [1, 8])
def test_embeddings_have_the_rows_of_the_unscaled_batch(scale: int) -> None:
    """BERT's word embedding: 6 % of the rows of one worker, 28 % of eight; a row is three blocks at every scale."""
    whole = model_table("BERT-base")
    table, layer = scaled(whole, scale), whole.layers[0]
    rows, width = layer.weight_shape
    ranks = [words(table, rank, whole) for rank in range(8)]
    assert ranks[0].size == table.layers[0].weight_count
    look_ups = whole.batch * layer.positions
    one = [touched(gradient, width).mean() for gradient in ranks]
    assert np.mean(one) == pytest.approx(distinct_rows(rows, look_ups, 1.0) / rows, rel=0.1)
    eight = touched(np.any(ranks, axis=0), width).mean()
    assert eight == pytest.approx(distinct_rows(rows, 8 * look_ups, 1.0) / rows, rel=0.1)
    zero_blocks = ~touched(ranks[0], BLOCK)
    assert zero_blocks.mean() == pytest.approx(1 - one[0], abs=0.01)


def test_rows_that_are_looked_up_change_from_step_to_step() -> None:
    whole = model_table("BERT-base")
    table = scaled(whole, 8)
    gradients = LayerGradients(table, 0, whole)
    steps = [gradients.weight(table.layers[0]).reshape(-1) for _ in range(2)]
    assert not np.array_equal(*(touched(step, 768) for step in steps))


def test_same_rank_same_bytes_and_other_ranks_and_steps_others() -> None:
    whole = model_table("ViT-B/16")
    table = scaled(whole, 8)
    layer = next(layer for layer in table.layers if layer.name.endswith("mlp.0"))
    first, again, other = (LayerGradients(table, rank, whole) for rank in (0, 0, 1))
    drawn = first.weight(layer)
    assert drawn.tobytes() == again.weight(layer).tobytes()
    assert not np.array_equal(drawn, other.weight(layer))
    assert not np.array_equal(drawn, first.weight(layer))
    assert first.bias(layer).shape == (layer.bias_count,)


def test_ranks_with_the_same_worker_have_the_same_exponents_and_other_numbers() -> None:
    workers = index()["workers"]
    numbers = [Stock("gpt", "mlp", 1 << 14, rank).draw(1 << 14) for rank in (0, workers)]
    assert not np.array_equal(*numbers)
    assert np.array_equal(*(np.frexp(part)[1] for part in numbers))


@pytest.mark.parametrize("name", list(MODELS))
def test_every_layer_of_every_model_has_gradients(name: str) -> None:
    whole = model_table(name)
    table = scaled(whole, 16)
    gradients = LayerGradients(table, 3, whole)
    for layer in table.layers:
        if table.factors_pay(layer):
            rows, outputs = gradients.factors(layer)
            assert (outputs.shape[1], rows.shape[1]) == layer.weight_shape
            assert len(rows) == len(outputs) == table.factor_count(layer)
            drawn = outputs.T @ rows
        else:
            drawn = gradients.weight(layer)
        assert drawn.shape == layer.weight_shape
        assert np.isfinite(drawn).all()
        assert float(np.abs(drawn).max()) < 1e3
        # A small piece may be one of units that a ReLU has switched off, and rare rows are not looked up.
        assert drawn.any() or drawn.size < 1024 or layer.kind == "embedding", layer.name


def test_columns_of_factors_are_zero_as_often_as_in_a_whole_batch() -> None:
    pieces = exponents("cnn", "fc.rows", index()["steps"][-1])[0]
    dead = 1 - pieces.any(axis=1).mean()
    rows = factor("cnn", "fc.rows", (2, 1 << 14), 0, 5)
    assert 1 - rows.any(axis=0).mean() == pytest.approx(dead, abs=0.03)


def test_large_gradients_are_several_windows() -> None:
    layer = LayerSpec("conv", "conv", (3000, 2000, 1, 1), False, flops=1.0)
    gradients = LayerGradients(ModelTable("large", (layer,), 1, 0.1, "none"), 0)
    drawn = gradients.weight(layer).reshape(-1)
    assert drawn.size == 6_000_000
    assert (drawn[-1000:] != 0).any()


def test_a_first_step_of_adamw_changes_the_bits_that_it_must() -> None:
    """All parameters move by the learning rate: one of 0.02 by 2^16 of its least steps, and by 0.8 of a bf16's."""
    command = [sys.executable, str(SCRIPT.with_name("pulls.py")), "--rates", "1e-4", "--steps", "0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    *_, wide, narrow = answer.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert 20 < float(wide) < 23
    assert 4 < float(narrow) < 7


def test_the_command_makes_a_sample(tmp_path: Path) -> None:
    out = tmp_path / "sample.npz"
    command = [sys.executable, str(SCRIPT), "--families", "dlrm", "--steps", "0", "2", "--out", str(out)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    with np.load(out) as made:
        assert {"index", "dlrm/embedding/0", "dlrm/mlp/2", "dlrm/vector/2"} <= set(made.files)
        assert made["dlrm/embedding/2"].any(axis=2).all()
