"""Devices: how long an iteration of a table takes on each device that the papers used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from poseidon.models.classic import vgg19
from poseidon.models.table import ModelTable, seconds_by_flops

_K40_BATCH = 64
_K40_BATCHES = {"AlexNet": 512}
# Geryon reaches 279.2 images/s with 8 workers (Table IV) at 94.6 % of eight single ones (Table II).
_K40_VGG19_IMAGES_PER_SECOND = 279.2 / 8 / 0.946


def k40(table: ModelTable) -> ModelTable:
    """`table` as Geryon §V ran it on a Tesla K40: VGG-19 takes 1.73 s, others by FLOPs.

    Batches have 64 images, those of AlexNet 512. Other samples than images keep their number.
    """
    batch = _K40_BATCHES.get(table.name, _K40_BATCH) if table.sample == "image" else table.batch
    reference = replace(vgg19(), batch=_K40_BATCH, iteration_seconds=_K40_BATCH / _K40_VGG19_IMAGES_PER_SECOND)
    seconds = seconds_by_flops(table.layers, batch, reference, table.forward_share)
    source = "VGG-19's rate on one K40 (Geryon Tables II and IV), by FLOPs"
    return replace(table, batch=batch, iteration_seconds=seconds, iteration_source=source)


DEVICES: dict[str, Callable[[ModelTable], ModelTable]] = {"titan-x": lambda table: table, "k40": k40}
