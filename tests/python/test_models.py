"""The layer tables against the parameter counts, times and FLOPs that the papers give."""

from __future__ import annotations

import pytest

from poseidon.models import MODELS, ModelTable, model_table, scaled
from poseidon.models.table import pooled

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
}
FORWARD_GIGAFLOPS = {
    "VGG19": 39.3,
    "AlexNet": 1.45,
    "GoogLeNet": 3.2,
    "ResNet-50": 8.2,
    "ResNet-152": 23.1,
    "YOLO": 40.6,
}


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


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="known are titan-x, k40"):
        model_table("VGG19", "v100")


@pytest.mark.parametrize("name", MODELS)
def test_names_are_unique_and_durations_add_up(name: str) -> None:
    table = model_table(name)
    assert len({layer.name for layer in table.layers}) == len(table.layers)
    durations = table.durations(3.6)
    assert sum(forward for forward, _ in durations) == pytest.approx(1.2)
    assert sum(backward for _, backward in durations) == pytest.approx(2.4)
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
