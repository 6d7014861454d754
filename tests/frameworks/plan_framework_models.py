"""Models of timm, transformers and poseidon.models with a batch each, at random and without any download."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any]

TIMM = (
    "resnet18",
    "vit_tiny_patch16_224",
    "convnext_atto",
    "mobilenetv3_small_050",
    "efficientnet_lite0",
    "regnetx_002",
    "levit_128s",
    "mixer_s32_224",
)
_SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_LONG = {**_SIZES, "intermediate_size": 128}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Bert": _LONG,
    "Roberta": _LONG,
    "Albert": {**_LONG, "embedding_size": 32},
    "Electra": {**_LONG, "embedding_size": 32},
    "DistilBert": {"vocab_size": 300, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    "GPT2": {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False},
    "Llama": {**_LONG, "num_key_value_heads": 2, "use_cache": False},
    "Mixtral": {**_LONG, "num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False},
}
TABLES = ("VGG19", "AlexNet", "GoogLeNet", "BERT-base")
SCALE = 16


def _image_model(name: str) -> Made:
    if find_spec("torchvision") is None:  # of which timm uses no more than two classes
        sys.path.insert(0, str(Path(__file__).parent / "stand_in"))
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=10), torch.randn(2, 3, 224, 224)


def _text_model(name: str) -> Made:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TRANSFORMERS[name])
    return getattr(transformers, f"{name}Model")(config), {"input_ids": torch.randint(0, 300, (2, 9))}


def _replayed(name: str) -> Made:
    from poseidon.bench.training.replay import ReplayModel, input_token
    from poseidon.models import model_table, scaled

    return ReplayModel(scaled(model_table(name), SCALE), 0.01), input_token()


def attribute(name: str) -> str:
    """The name under which this module has a model."""
    return "".join(one if one.isalnum() else "_" for one in name)


MAKERS: dict[str, Callable[[], Made]] = {
    **{attribute(name): partial(_image_model, name) for name in TIMM},
    **{attribute(name): partial(_text_model, name) for name in TRANSFORMERS},
    **{attribute(name): partial(_replayed, name) for name in TABLES},
}
globals().update(MAKERS)
