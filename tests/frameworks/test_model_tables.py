"""The layer tables of transformers have the parameters of the models that people load: each size as often."""

from __future__ import annotations

import torch
from torch import nn

from poseidon.models import model_table
from runs import skip_without


def table_sizes(name: str) -> list[int]:
    return sorted(count for layer in model_table(name).layers for count in layer.tensors.values())


def trained_sizes(module: nn.Module) -> list[int]:
    return sorted(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def test_bert_base() -> None:
    skip_without("transformers")
    import transformers

    with torch.device("meta"):
        module = transformers.BertModel(transformers.BertConfig())
    assert table_sizes("BERT-base") == trained_sizes(module)


def test_gpt2() -> None:
    skip_without("transformers")
    import transformers

    with torch.device("meta"):
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    assert module.lm_head.weight is module.transformer.wte.weight
    assert table_sizes("GPT-2") == trained_sizes(module)


def test_vit_b16() -> None:
    skip_without("transformers")
    import transformers

    with torch.device("meta"):
        module = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    # Hugging Face has three projections where the table, like torchvision, has one.
    assert sum(table_sizes("ViT-B/16")) == sum(trained_sizes(module))


def test_llama_with_a_head_of_its_own() -> None:
    skip_without("transformers")
    import transformers

    small = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(small)
    assert table_sizes("Llama-134M") == trained_sizes(module)


def test_llama_with_lora_on_every_projection() -> None:
    skip_without("transformers", "peft")
    import peft
    import transformers

    llama_3_2_1b = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(llama_3_2_1b)
        adapted = peft.get_peft_model(module, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert sum(parameter.numel() for parameter in adapted.parameters()) == 1_247_086_592
    assert table_sizes("Llama-1B LoRA") == trained_sizes(adapted)
