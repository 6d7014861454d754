"""Layer tables of the networks that the papers measure, and of others that people train."""

from __future__ import annotations

from collections.abc import Callable

from poseidon.errors import InvalidArgument
from poseidon.models.classic import alexnet, cifar10_quick, vgg19, vgg19_22k
from poseidon.models.detection import yolo
from poseidon.models.devices import DEVICES
from poseidon.models.inception import googlenet, inception_v3
from poseidon.models.recommendation import dlrm
from poseidon.models.resnet import resnet50, resnet152
from poseidon.models.table import LayerSpec, ModelTable, ParameterSpec, scaled
from poseidon.models.transformer import bert_base, gpt2, llama_1b_lora, vit_b16

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
