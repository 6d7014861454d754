"""YOLO: a detector with most parameters in the fully connected layers and most arithmetic in the convolutions."""

from __future__ import annotations

from poseidon.models.classic import vgg19
from poseidon.models.table import ModelTable, TableBuilder, pooled, seconds_by_flops

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
