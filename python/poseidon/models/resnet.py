"""ResNet-50 and ResNet-152: many small layers, few parameters in the fully connected one."""

from __future__ import annotations

from poseidon.models.table import ModelTable, TableBuilder, pooled


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
