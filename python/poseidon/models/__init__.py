"""Layer tables of the networks that the papers measure."""

from __future__ import annotations

from collections.abc import Callable

from poseidon.models.classic import alexnet, cifar10_quick, vgg19, vgg19_22k
from poseidon.models.inception import googlenet, inception_v3
from poseidon.models.resnet import resnet50, resnet152
from poseidon.models.table import LayerSpec, ModelTable, scaled

MODELS: dict[str, Callable[[], ModelTable]] = {
    "VGG19": vgg19,
    "VGG19-22K": vgg19_22k,
    "AlexNet": alexnet,
    "GoogLeNet": googlenet,
    "Inception-V3": inception_v3,
    "ResNet-50": resnet50,
    "ResNet-152": resnet152,
    "CIFAR-10 quick": cifar10_quick,
}

__all__ = ["MODELS", "LayerSpec", "ModelTable", "model_table", "scaled"]


def _simplified(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def model_table(name: str) -> ModelTable:
    """The table of a model by its name; case, spaces and hyphens do not matter. ValueError for an unknown one."""
    for known, build in MODELS.items():
        if _simplified(known) == _simplified(name):
            return build()
    raise ValueError(f"unknown model {name!r}; known are {', '.join(MODELS)}")
