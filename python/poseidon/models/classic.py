"""Plain chains: VGG19, VGG19-22K, AlexNet, CIFAR-10 quick and YOLO, with most parameters in the fully connected layers,
and ResNets."""

from __future__ import annotations

from itertools import pairwise

from poseidon.models.table import ModelTable, TableBuilder, pooled, seconds_by_flops

_TABLES, _ROWS, _WIDTH = 4, 1_000_000, 16
_CLICKS = 1024
_BOTTOM, _TOP = (13, 512, 256, 64, _WIDTH), (512, 256, 1)
# How often the values of a categorical feature occur: few very often, most hardly ever. Assumed.
_CLICK_EXPONENT = 1.05
# Naumov et al., Deep Learning Recommendation Model, §5.2: 1,000 batches of 2,048 take 62 s on one V100 with Caffe2.
_SECONDS_PER_SAMPLE = 62 / (1000 * 2048)
_CLICKS_SOURCE = (
    "DLRM §5.2: 62 s for 1,000 batches of 2,048 samples on one V100, by samples; "
    "that model has 8 tables of 10⁶ × 64 and wider layers"
)


def dlrm() -> ModelTable:
    """DLRM with 4 tables of 10⁶ × 16, on 1,024 clicks: 64.30 M parameters, 99.5 % of them in the tables.

    The multilayer perceptrons are those of the authors' benchmark on Criteo's Kaggle data
    (`bench/dlrm_s_criteo_kaggle.sh` of facebookresearch/dlrm): 13-512-256-64-16 below, 512-256-1 above. A click looks
    up one row of each table, by a Zipf law with exponent 1.05.
    """
    builder = TableBuilder()
    for index, (inputs, outputs) in enumerate(pairwise(_BOTTOM)):
        builder.fc(f"bottom.{index}", inputs, outputs)
    for index in range(_TABLES):
        builder.embedding(f"tables.{index}", _ROWS, _WIDTH, 1, _CLICK_EXPONENT)
    # The products of each pair of the tables' rows and the bottom's output go on with that output.
    pair_count = _TABLES * (_TABLES + 1) // 2
    builder.work(2 * _WIDTH * pair_count)
    for index, (inputs, outputs) in enumerate(pairwise((_WIDTH + pair_count, *_TOP))):
        builder.fc(f"top.{index}", inputs, outputs)
    return ModelTable(
        "DLRM", tuple(builder.layers), _CLICKS, _CLICKS * _SECONDS_PER_SAMPLE, _CLICKS_SOURCE, sample="click"
    )


_VGG19_STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels and convolutions of each stage


def _vgg19(name: str, class_count: int, images_per_second: float) -> ModelTable:
    builder = TableBuilder()
    shape = (3, 224, 224)
    for stage, (channels, depth) in enumerate(_VGG19_STAGES, start=1):
        for index in range(1, depth + 1):
            shape = builder.conv(f"conv{stage}_{index}", shape, channels, 3, padding=1)
        shape = pooled(shape, 2, 2)
    width = builder.fc("fc6", shape[0] * shape[1] * shape[2], 4096)
    width = builder.fc("fc7", width, 4096)
    builder.fc("fc8", width, class_count)
    source = f"Poseidon §5.1: Caffe on one Titan X, {images_per_second} images/s"
    return ModelTable(name, tuple(builder.layers), 32, 32 / images_per_second, source)


def vgg19() -> ModelTable:
    """VGG19 for 1,000 classes: 143.67 M parameters, 86 % of them in three fc layers."""
    return _vgg19("VGG19", 1000, 35.5)


def vgg19_22k() -> ModelTable:
    """VGG19 with a 21,841-way classifier: 229.05 M parameters."""
    return _vgg19("VGG19-22K", 21841, 34.6)


def alexnet() -> ModelTable:
    """AlexNet as Krizhevsky trained it, with the two-group convolutions: 60.97 M parameters.

    Poseidon §2.2 rounds to 61.5 M; the variant without groups that PyTorch ships has 61.10 M. The fully connected
    layers hold 96.17 % of this one; Geryon §III-B counts 93.99 %, which is this one with ungrouped convolutions.
    """
    builder = TableBuilder()
    shape = builder.conv("conv1", (3, 227, 227), 96, 11, stride=4)
    shape = pooled(shape, 3, 2)
    shape = builder.conv("conv2", shape, 256, 5, padding=2, groups=2)
    shape = pooled(shape, 3, 2)
    shape = builder.conv("conv3", shape, 384, 3, padding=1)
    shape = builder.conv("conv4", shape, 384, 3, padding=1, groups=2)
    shape = builder.conv("conv5", shape, 256, 3, padding=1, groups=2)
    shape = pooled(shape, 3, 2)
    width = builder.fc("fc6", shape[0] * shape[1] * shape[2], 4096)
    width = builder.fc("fc7", width, 4096)
    builder.fc("fc8", width, 1000)
    return ModelTable("AlexNet", tuple(builder.layers), 256, 0.25, "Poseidon §2.2: 0.25 s per batch on one Titan X")


def cifar10_quick() -> ModelTable:
    """Caffe's CIFAR-10 quick: 145,578 parameters. No paper reports its time: 5,000 images/s are assumed."""
    builder = TableBuilder()
    shape = builder.conv("conv1", (3, 32, 32), 32, 5, padding=2)
    shape = pooled(shape, 3, 2, round_up=True)
    shape = builder.conv("conv2", shape, 32, 5, padding=2)
    shape = pooled(shape, 3, 2, round_up=True)
    shape = builder.conv("conv3", shape, 64, 5, padding=2)
    shape = pooled(shape, 3, 2, round_up=True)
    width = builder.fc("ip1", shape[0] * shape[1] * shape[2], 64)
    builder.fc("ip2", width, 10)
    return ModelTable("CIFAR-10 quick", tuple(builder.layers), 100, 100 / 5000, "assumed: 5,000 images/s")


def _resnet(name: str, depths: tuple[int, int, int, int], iteration_seconds: float, source: str) -> ModelTable:
    builder = TableBuilder(norm=True)
    shape = builder.conv("conv1", (3, 224, 224), 64, 7, stride=2, padding=3)
    shape = pooled(shape, 3, 2, padding=1)
    for stage, depth in enumerate(depths, start=1):
        width = 64 * 2 ** (stage - 1)
        for block in range(depth):
            prefix = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            inner = builder.conv(f"{prefix}.conv1", shape, width, 1)
            inner = builder.conv(f"{prefix}.conv2", inner, width, 3, stride=stride, padding=1)
            inner = builder.conv(f"{prefix}.conv3", inner, 4 * width, 1)
            if block == 0:
                builder.conv(f"{prefix}.downsample", shape, 4 * width, 1, stride=stride)
            shape = inner
    builder.fc("fc", shape[0], 1000)
    return ModelTable(name, tuple(builder.layers), 32, iteration_seconds, source)


# Parameter Hub Table 3 gives 161 ms for ResNet-50 and 268 ms for VGG19 on a GTX 1080 Ti; VGG19 took 0.90 s on the
# Titan X of the other tables.
_RESNET50_SECONDS = 0.161 * 0.90 / 0.268
_SOURCE = "Parameter Hub Table 3, times VGG19's ratio of Titan X to GTX 1080 Ti"


def resnet50() -> ModelTable:
    """ResNet-50: 25,557,032 parameters."""
    return _resnet("ResNet-50", (3, 4, 6, 3), _RESNET50_SECONDS, _SOURCE)


def resnet152() -> ModelTable:
    """ResNet-152: 60,192,808 parameters. Its time is ResNet-50's times the ratio of their FLOPs (2.82)."""
    return _resnet("ResNet-152", (3, 8, 36, 3), _RESNET50_SECONDS * 2.82, _SOURCE + ", by FLOPs")


# Kernel, channels and stride of each convolution; a max pooling follows each stage but the last two (Redmon et al.,
# You Only Look Once, Figure 3).
_HALVING = ((1, 256, 1), (3, 512, 1))
_STAGES: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((7, 64, 2),),
    ((3, 192, 1),),
    ((1, 128, 1), (3, 256, 1), (1, 256, 1), (3, 512, 1)),
    (*_HALVING, *_HALVING, *_HALVING, *_HALVING, (1, 512, 1), (3, 1024, 1)),
    ((1, 512, 1), (3, 1024, 1), (1, 512, 1), (3, 1024, 1), (3, 1024, 1), (3, 1024, 2)),
    ((3, 1024, 1), (3, 1024, 1)),
)
_POOLED_STAGES = 4


def yolo() -> ModelTable:
    """YOLO for 448×448 images, 7×7 cells of 30 values: 271.70 M parameters, 77.86 % of them in two fc layers."""
    builder = TableBuilder()
    shape = (3, 448, 448)
    for stage, convolutions in enumerate(_STAGES, start=1):
        for index, (kernel, channels, stride) in enumerate(convolutions, start=1):
            name = f"conv{stage}_{index}"
            shape = builder.conv(name, shape, channels, kernel, stride=stride, padding=kernel // 2)
        if stage <= _POOLED_STAGES:
            shape = pooled(shape, 2, 2)
    width = builder.fc("fc1", shape[0] * shape[1] * shape[2], 4096)
    builder.fc("fc2", width, 7 * 7 * 30)
    layers = tuple(builder.layers)
    return ModelTable(
        "YOLO", layers, 64, seconds_by_flops(layers, 64, vgg19()), "VGG19's rate on one Titan X, by FLOPs"
    )
