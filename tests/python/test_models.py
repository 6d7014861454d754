"""The layer tables against the parameter counts, times and FLOPs that papers and libraries give."""

from __future__ import annotations

import pytest

from poseidon.models import MODELS, ModelTable, model_table, scaled
from poseidon.models.table import distinct_rows, pooled

PARAMETER_COUNTS = {
    "VGG19": 143_667_240,
    "VGG19-22K": 229_052_817,
    "AlexNet": 60_965_224,
    "GoogLeNet": 6_998_552,
    "Inception-V3": 27_161_264,
    "ResNet-50": 25_557_032,
    "ResNet-152": 60_192_808,
    "YOLO": 271_703_550,
    "CIFAR-10 quick": 145_578,
    "BERT-base": 109_482_240,
    "GPT-2": 124_439_808,
    "ViT-B/16": 86_567_656,
    "Llama-134M": 134_105_856,
    "Llama-1B LoRA": 11_272_192,
    "DLRM": 64_301_393,
}
FORWARD_GIGAFLOPS = {
    "VGG19": 39.3,
    "AlexNet": 1.45,
    "GoogLeNet": 3.2,
    "ResNet-50": 8.2,
    "ResNet-152": 23.1,
    "YOLO": 40.6,
    "BERT-base": 22.4,  # 2 × 85.6 M × 128 tokens, and 0.6 of attention
    "GPT-2": 291.7,  # 2 × 123.5 M × 1,024 tokens, and 38.7 of attention
    "ViT-B/16": 35.1,  # torchvision: 17.56 G multiply-adds
    "Llama-134M": 58.5,  # 2 × 109.5 M × 256 tokens, and 2.4 of attention
    "Llama-1B LoRA": 1311,  # 2 × (1,235.8 M + 11.3 M) × 512 tokens, and 34.4 of attention
}
SUITE = ["BERT-base", "GPT-2", "ViT-B/16", "Llama-134M", "Llama-1B LoRA", "DLRM"]


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts(name: str) -> None:
    assert model_table(name).parameter_count == PARAMETER_COUNTS[name]


@pytest.mark.parametrize(("name", "gigaflops"), FORWARD_GIGAFLOPS.items())
def test_flops_of_the_forward_pass(name: str, gigaflops: float) -> None:
    assert model_table(name).flops / 1e9 == pytest.approx(gigaflops, rel=0.03)


@pytest.mark.parametrize(
    ("name", "batch", "images_per_second"),
    [("VGG19", 32, 35.5), ("VGG19-22K", 32, 34.6), ("GoogLeNet", 128, 257), ("Inception-V3", 32, 43.2)],
)
def test_times_of_the_paper(name: str, batch: int, images_per_second: float) -> None:
    table = model_table(name)
    assert table.batch == batch
    assert table.batch / table.iteration_seconds == pytest.approx(images_per_second)


def test_alexnet_time_of_the_paper() -> None:
    assert (model_table("AlexNet").batch, model_table("AlexNet").iteration_seconds) == (256, 0.25)


def test_fully_connected_shapes_of_vgg19() -> None:
    shapes = [layer.weight_shape for layer in model_table("VGG19").layers if layer.kind == "fc"]
    assert shapes == [(4096, 25088), (4096, 4096), (1000, 4096)]


def test_googlenet_has_the_thin_layer_of_the_paper() -> None:
    layers = model_table("GoogLeNet").layers
    assert [layer.weight_shape for layer in layers if layer.factorable] == [(1000, 1024)]
    assert sum(layer.parameter_count for layer in layers if layer.kind == "conv") == 5_973_552


def fc_share(table: ModelTable) -> float:
    return sum(layer.parameter_count for layer in table.layers if layer.kind == "fc") / table.parameter_count


@pytest.mark.parametrize(("name", "share"), [("VGG19", 0.8606), ("YOLO", 0.7786), ("ResNet-50", 0.0802)])
def test_share_of_the_fully_connected_layers_of_the_paper(name: str, share: float) -> None:
    assert fc_share(model_table(name)) == pytest.approx(share, abs=5e-5)


def test_alexnet_share_of_the_paper_is_that_without_groups() -> None:
    table = model_table("AlexNet")
    assert fc_share(table) == pytest.approx(0.9617, abs=5e-5)
    grouped = {"conv2", "conv4", "conv5"}
    missing = sum(layer.weight_count for layer in table.layers if layer.name in grouped)
    assert fc_share(table) * table.parameter_count / (table.parameter_count + missing) == pytest.approx(
        0.9399, abs=5e-5
    )


def test_yolo_has_the_layers_of_its_paper() -> None:
    layers = model_table("YOLO").layers
    assert [layer.kind for layer in layers] == ["conv"] * 24 + ["fc"] * 2
    assert [layer.weight_shape for layer in layers[-2:]] == [(4096, 7 * 7 * 1024), (1470, 4096)]
    assert layers[-3].positions == 7 * 7


@pytest.mark.parametrize(
    ("name", "batch", "seconds"),
    [("VGG19", 64, 1.735), ("AlexNet", 512, 0.512), ("ResNet-50", 64, 0.362), ("YOLO", 64, 1.79)],
)
def test_k40_times(name: str, batch: int, seconds: float) -> None:
    table = model_table(name, "k40")
    assert table.batch == batch
    assert table.iteration_seconds == pytest.approx(seconds, rel=0.005)
    assert table.layers == model_table(name).layers


def test_k40_keeps_the_number_of_samples_that_are_no_images() -> None:
    sequences, images = model_table("GPT-2", "k40"), model_table("ViT-B/16", "k40")
    assert (sequences.batch, images.batch) == (8, 64)
    seconds = [model_table(name, "k40").iteration_seconds for name in ("GPT-2", "Llama-1B LoRA")]
    titan_seconds = [model_table(name).iteration_seconds for name in ("GPT-2", "Llama-1B LoRA")]
    assert seconds[0] / titan_seconds[0] == pytest.approx(seconds[1] / titan_seconds[1])


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="known are titan-x, k40"):
        model_table("VGG19", "v100")


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_durations_add_up(name: str) -> None:
    table = model_table(name)
    assert len({layer.name for layer in table.layers}) == len(table.layers)
    durations = table.durations(3.6)
    assert sum(forward for forward, _ in durations) == pytest.approx(3.6 * table.forward_share)
    assert sum(sum(pair) for pair in durations) == pytest.approx(3.6)
    assert table.forward_share == pytest.approx(1 / 2 if "LoRA" in name else 1 / 3)
    assert min(min(pair) for pair in durations) > 0


def test_scaling_divides_both_dimensions_and_the_batch() -> None:
    table = scaled(model_table("VGG19"), 4)
    by_name = {layer.name: layer for layer in table.layers}
    assert table.batch == 8
    assert by_name["fc6"].weight_shape == (1024, 6272)
    assert by_name["conv5_1"].weight_shape == (128, 128, 3, 3)
    assert by_name["conv1_1"].weight_shape == (16, 1, 3, 3)
    assert table.factor_count(by_name["fc6"]) == 8
    assert table.factor_count(by_name["conv5_1"]) == 0
    assert table.parameter_count == pytest.approx(PARAMETER_COUNTS["VGG19"] / 16, rel=0.001)


@pytest.mark.parametrize(
    ("name", "layers"), [("BERT-base", ["pooler"]), ("GPT-2", []), ("Llama-134M", []), ("ViT-B/16", ["head"])]
)
def test_factors_pay_only_where_one_row_of_a_sample_counts(name: str, layers: list[str]) -> None:
    table = model_table(name)
    assert [layer.name for layer in table.layers if table.factors_pay(layer)] == layers
    assert all(table.factors_pay(layer) for layer in model_table("VGG19").layers if layer.kind == "fc")


def test_low_rank_layers_and_clicks_gain_nothing_from_factors() -> None:
    for name in ("Llama-1B LoRA", "DLRM"):
        table = model_table(name)
        assert not any(table.factors_pay(layer) for layer in table.layers)
        assert any(layer.factorable for layer in table.layers)


def test_gpt2_has_one_embedding_for_both_of_its_ends() -> None:
    table = model_table("GPT-2")
    embedding, head = table.layers[0], table.layers[-1]
    assert (head.shares, head.weight_shape) == (embedding.name, embedding.weight_shape)
    assert (head.parameter_count, head.tensors, head.factorable) == (0, {}, False)
    assert head.flops == pytest.approx(2 * 50257 * 768 * 1024)
    assert table.rows_touched(embedding) == 50257  # the head has a gradient for every row


def test_llama_has_an_embedding_whose_rows_few_tokens_touch() -> None:
    """2,048 tokens by Zipf's law touch 4 % of 32,000 words: all others are zeros in the gradient."""
    table = model_table("Llama-134M")
    embedding, head = table.layers[0], table.layers[-1]
    assert (embedding.weight_shape, head.weight_shape, head.shares) == ((32000, 768), (32000, 768), "")
    assert table.factor_count(head) == 2048
    assert table.rows_touched(embedding) / 32000 < 0.05


def test_rows_touched_are_those_of_the_law() -> None:
    uniform = 1000 * (1 - (1 - 1 / 1000) ** 500)
    assert distinct_rows(1000, 500, 0.0) == pytest.approx(uniform)
    assert distinct_rows(1, 500, 1.0) == 1
    # Two rows with weights 1 and 1/2, looked up twice: 2/3 and 1/3.
    assert distinct_rows(2, 2, 1.0) == pytest.approx(2 - (1 / 3) ** 2 - (2 / 3) ** 2)
    table = model_table("DLRM")
    tables = [layer for layer in table.layers if layer.kind == "embedding"]
    assert [layer.weight_shape for layer in tables] == [(1_000_000, 16)] * 4
    assert 600 < table.rows_touched(tables[0]) < 650  # of 1,024 clicks


@pytest.mark.parametrize("divisor", [4, 8])
@pytest.mark.parametrize("name", SUITE)
def test_scaling_keeps_the_order_of_bytes(name: str, divisor: int) -> None:
    full, small = model_table(name), scaled(model_table(name), divisor)
    assert small.parameter_count * divisor**2 == pytest.approx(full.parameter_count, rel=0.03)  # vectors fall less
    for layer, shrunk in zip(full.layers, small.layers, strict=True):
        assert full.factors_pay(layer) == small.factors_pay(shrunk), layer.name
        assert full.factor_count(layer) == divisor * small.factor_count(shrunk), layer.name
    by_name = {layer.name: layer for layer in small.layers}
    assert all(layer.weight_shape == by_name[layer.shares].weight_shape for layer in small.layers if layer.shares)


def test_scaling_never_empties_a_dimension() -> None:
    table = scaled(model_table("CIFAR-10 quick"), 1000)
    assert table.batch == 1
    assert all(min(layer.weight_shape) >= 1 for layer in table.layers)


def test_scale_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        scaled(model_table("VGG19"), 0)


def test_model_names_are_lenient_but_not_guessed() -> None:
    assert model_table("vgg19-22k").name == "VGG19-22K"
    assert model_table("resnet50").name == "ResNet-50"
    with pytest.raises(ValueError, match="known are VGG19"):
        model_table("vgg20")


def test_pooling_rounds_as_each_framework_does() -> None:
    assert pooled((1, 112, 112), 3, 2, round_up=True) == (1, 56, 56)
    assert pooled((1, 112, 112), 3, 2) == (1, 55, 55)
