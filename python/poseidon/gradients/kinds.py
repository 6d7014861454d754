"""Which part of the sample stands for which layer of a table."""

from __future__ import annotations

from poseidon.models import LayerSpec, ModelTable


def family_of(table: ModelTable) -> str:
    """The family of networks in the sample that a table is most like."""
    layers = table.layers
    if any("lora" in layer.name for layer in layers):
        return "lora"
    if table.sample == "click":
        return "dlrm"
    if any(layer.kind == "fc" and layer.positions > 1 for layer in layers):
        return "gpt" if any(layer.kind == "embedding" for layer in layers) else "vit"
    return "resnet" if any(layer.kind == "norm" for layer in layers) else "cnn"


def kind_of(table: ModelTable, layer: LayerSpec) -> str:
    """The kind of a layer's weight in the sample. Biases and norms are of the kind "vector"."""
    if layer.kind != "fc":
        return {"conv": "conv", "norm": "vector", "embedding": "embedding", "plain": "positions"}[layer.kind]
    for part, kind in (("lora_A", "lora_a"), ("lora_B", "lora_b"), ("attn", "attention"), ("attention", "attention")):
        if part in layer.name:
            return kind
    is_last = layer.name == [other.name for other in table.layers if other.kind == "fc"][-1]
    if is_last and table.sample != "click":
        return "head"
    return "fc" if family_of(table) in ("cnn", "resnet") else "mlp"
