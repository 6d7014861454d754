"""VGG19, VGG19-22K, AlexNet and CIFAR-10 quick: plain chains with most parameters in the fully connected layers."""

from __future__ import annotations

from poseidon.models.table import ModelTable, TableBuilder, pooled

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
