"""Layer tables of the networks that the papers measure, and of others that people train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from poseidon.errors import InvalidArgument
from poseidon.models.classic import alexnet, cifar10_quick, dlrm, resnet50, resnet152, vgg19, vgg19_22k, yolo
from poseidon.models.inception import googlenet, inception_v3
from poseidon.models.table import LayerSpec, ModelTable, ParameterSpec, scaled, seconds_by_flops
from poseidon.models.transformer import bert_base, gpt2, llama_1b_lora, llama_134m, vit_b16

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
MODELS: dict[str, Callable[[], ModelTable]] = {
    "VGG19": vgg19,
    "VGG19-22K": vgg19_22k,
    "AlexNet": alexnet,
    "GoogLeNet": googlenet,
    "Inception-V3": inception_v3,
    "ResNet-50": resnet50,
    "ResNet-152": resnet152,
    "YOLO": yolo,
    "CIFAR-10 quick": cifar10_quick,
    "BERT-base": bert_base,
    "GPT-2": gpt2,
    "ViT-B/16": vit_b16,
    "Llama-134M": llama_134m,
    "Llama-1B LoRA": llama_1b_lora,
    "DLRM": dlrm,
}


def _simplified(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def model_table(name: str, device: str = "titan-x") -> ModelTable:
    """The table of a model by its name, timed on a device of `DEVICES`; case, spaces and hyphens do not matter.

    InvalidArgument for an unknown one.
    """
    if device not in DEVICES:
        raise InvalidArgument(f"unknown device {device!r}; known are {', '.join(DEVICES)}")
    for known, build in MODELS.items():
        if _simplified(known) == _simplified(name):
            return DEVICES[device](build())
    raise InvalidArgument(f"unknown model {name!r}; known are {', '.join(MODELS)}")
