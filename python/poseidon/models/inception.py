"""GoogLeNet and Inception-V3."""

from __future__ import annotations

from poseidon.models.table import ModelTable, Shape, TableBuilder, pooled

# 1×1, 3×3 reduce, 3×3, 5×5 reduce, 5×5, pool projection (Szegedy et al., Going deeper with convolutions, Table 1).
_GOOGLENET_MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_GOOGLENET_POOLED_AFTER = {"3b", "4e"}


def _googlenet_module(builder: TableBuilder, name: str, shape: Shape) -> Shape:
    one, three_reduce, three, five_reduce, five, projection = _GOOGLENET_MODULES[name]
    prefix = f"inception_{name}"
    builder.conv(f"{prefix}.1x1", shape, one, 1)
    reduced = builder.conv(f"{prefix}.3x3_reduce", shape, three_reduce, 1)
    builder.conv(f"{prefix}.3x3", reduced, three, 3, padding=1)
    reduced = builder.conv(f"{prefix}.5x5_reduce", shape, five_reduce, 1)
    builder.conv(f"{prefix}.5x5", reduced, five, 5, padding=2)
    builder.conv(f"{prefix}.pool_proj", shape, projection, 1)
    return one + three + five + projection, shape[1], shape[2]


def googlenet() -> ModelTable:
    """GoogLeNet as Caffe deploys it: 6,998,552 parameters, 5,973,552 of them in convolutions.

    The papers' "5M" fits neither count exactly. The two auxiliary classifiers, 6.4 M more that only training uses, are
    in neither; the 1000×1024 fc layer that Poseidon §5.2 speaks of is counted here.
    """
    builder = TableBuilder()
    shape = builder.conv("conv1.7x7_s2", (3, 224, 224), 64, 7, stride=2, padding=3)
    shape = pooled(shape, 3, 2, round_up=True)
    shape = builder.conv("conv2.3x3_reduce", shape, 64, 1)
    shape = builder.conv("conv2.3x3", shape, 192, 3, padding=1)
    shape = pooled(shape, 3, 2, round_up=True)
    for name in _GOOGLENET_MODULES:
        shape = _googlenet_module(builder, name, shape)
        if name in _GOOGLENET_POOLED_AFTER:
            shape = pooled(shape, 3, 2, round_up=True)
    builder.fc("loss3.classifier", shape[0], 1000)
    source = "Poseidon §5.1: Caffe on one Titan X, 257 images/s"
    return ModelTable("GoogLeNet", tuple(builder.layers), 128, 128 / 257, source)


def _mixed_35(builder: TableBuilder, name: str, shape: Shape, projection: int) -> Shape:
    builder.conv(f"{name}.1x1", shape, 64, 1)
    reduced = builder.conv(f"{name}.5x5_1", shape, 48, 1)
    builder.conv(f"{name}.5x5_2", reduced, 64, 5, padding=2)
    reduced = builder.conv(f"{name}.3x3dbl_1", shape, 64, 1)
    reduced = builder.conv(f"{name}.3x3dbl_2", reduced, 96, 3, padding=1)
    builder.conv(f"{name}.3x3dbl_3", reduced, 96, 3, padding=1)
    builder.conv(f"{name}.pool", shape, projection, 1)
    return 64 + 64 + 96 + projection, shape[1], shape[2]


def _reduce_to_17(builder: TableBuilder, name: str, shape: Shape) -> Shape:
    _, height, width = builder.conv(f"{name}.3x3", shape, 384, 3, stride=2)
    reduced = builder.conv(f"{name}.3x3dbl_1", shape, 64, 1)
    reduced = builder.conv(f"{name}.3x3dbl_2", reduced, 96, 3, padding=1)
    builder.conv(f"{name}.3x3dbl_3", reduced, 96, 3, stride=2)
    return 384 + 96 + shape[0], height, width


def _mixed_17(builder: TableBuilder, name: str, shape: Shape, inner: int) -> Shape:
    def row(step: str, before: Shape, channels: int) -> Shape:
        return builder.conv(f"{name}.{step}", before, channels, (1, 7), padding=(0, 3))

    def column(step: str, before: Shape, channels: int) -> Shape:
        return builder.conv(f"{name}.{step}", before, channels, (7, 1), padding=(3, 0))

    builder.conv(f"{name}.1x1", shape, 192, 1)
    reduced = row("7x7_2", builder.conv(f"{name}.7x7_1", shape, inner, 1), inner)
    column("7x7_3", reduced, 192)
    reduced = column("7x7dbl_2", builder.conv(f"{name}.7x7dbl_1", shape, inner, 1), inner)
    reduced = column("7x7dbl_4", row("7x7dbl_3", reduced, inner), inner)
    row("7x7dbl_5", reduced, 192)
    builder.conv(f"{name}.pool", shape, 192, 1)
    return 768, shape[1], shape[2]


def _reduce_to_8(builder: TableBuilder, name: str, shape: Shape) -> Shape:
    reduced = builder.conv(f"{name}.3x3_1", shape, 192, 1)
    _, height, width = builder.conv(f"{name}.3x3_2", reduced, 320, 3, stride=2)
    reduced = builder.conv(f"{name}.7x7x3_1", shape, 192, 1)
    reduced = builder.conv(f"{name}.7x7x3_2", reduced, 192, (1, 7), padding=(0, 3))
    reduced = builder.conv(f"{name}.7x7x3_3", reduced, 192, (7, 1), padding=(3, 0))
    builder.conv(f"{name}.7x7x3_4", reduced, 192, 3, stride=2)
    return 320 + 192 + shape[0], height, width


def _mixed_8(builder: TableBuilder, name: str, shape: Shape) -> Shape:
    builder.conv(f"{name}.1x1", shape, 320, 1)
    reduced = builder.conv(f"{name}.3x3_1", shape, 384, 1)
    builder.conv(f"{name}.3x3_2a", reduced, 384, (1, 3), padding=(0, 1))
    builder.conv(f"{name}.3x3_2b", reduced, 384, (3, 1), padding=(1, 0))
    reduced = builder.conv(f"{name}.3x3dbl_1", shape, 448, 1)
    reduced = builder.conv(f"{name}.3x3dbl_2", reduced, 384, 3, padding=1)
    builder.conv(f"{name}.3x3dbl_3a", reduced, 384, (1, 3), padding=(0, 1))
    builder.conv(f"{name}.3x3dbl_3b", reduced, 384, (3, 1), padding=(1, 0))
    builder.conv(f"{name}.pool", shape, 192, 1)
    return 2048, shape[1], shape[2]


def inception_v3() -> ModelTable:
    """Inception-V3 with its auxiliary head: 27,161,264 parameters, norms included."""
    builder = TableBuilder(norm=True)
    shape = builder.conv("conv1a", (3, 299, 299), 32, 3, stride=2)
    shape = builder.conv("conv2a", shape, 32, 3)
    shape = builder.conv("conv2b", shape, 64, 3, padding=1)
    shape = pooled(shape, 3, 2)
    shape = builder.conv("conv3b", shape, 80, 1)
    shape = builder.conv("conv4a", shape, 192, 3)
    shape = pooled(shape, 3, 2)
    for name, projection in (("mixed_5b", 32), ("mixed_5c", 64), ("mixed_5d", 64)):
        shape = _mixed_35(builder, name, shape, projection)
    shape = _reduce_to_17(builder, "mixed_6a", shape)
    for name, inner in (("mixed_6b", 128), ("mixed_6c", 160), ("mixed_6d", 160), ("mixed_6e", 192)):
        shape = _mixed_17(builder, name, shape, inner)
    auxiliary = builder.conv("aux.conv0", pooled(shape, 5, 3), 128, 1)
    auxiliary = builder.conv("aux.conv1", auxiliary, 768, 5)
    builder.fc("aux.fc", auxiliary[0], 1000)
    shape = _reduce_to_8(builder, "mixed_7a", shape)
    for name in ("mixed_7b", "mixed_7c"):
        shape = _mixed_8(builder, name, shape)
    builder.fc("fc", shape[0], 1000)
    source = "Poseidon §5.1: TensorFlow on one Titan X, 43.2 images/s"
    return ModelTable("Inception-V3", tuple(builder.layers), 32, 32 / 43.2, source)
