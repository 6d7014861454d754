"""Transformers: BERT-base, GPT-2, ViT-B/16, a small Llama, and Llama 3.2 1B with LoRA.

Their fully connected layers are applied to every token, so K is batch × tokens and factors are larger than gradients.
Softmax, activations and residual sums are left out of the FLOPs; the products of the attention are counted in full,
also where a mask hides half of them. No paper of this project times a transformer. Their seconds are their FLOPs at
the rate that VGG19 reached on the device of the other tables.
"""

from __future__ import annotations

from poseidon.models.classic import vgg19
from poseidon.models.table import FORWARD_SHARE, ModelTable, TableBuilder, seconds_by_flops

_SOURCE = "VGG19's rate on one Titan X, by FLOPs"
_WORD_EXPONENT = 1.0  # of the frequencies of words (Zipf's law)


def _table(
    name: str, builder: TableBuilder, batch: int, sample: str, forward_share: float = FORWARD_SHARE
) -> ModelTable:
    layers = tuple(builder.layers)
    seconds = seconds_by_flops(layers, batch, vgg19(), forward_share)
    return ModelTable(name, layers, batch, seconds, _SOURCE, sample=sample, forward_share=forward_share)


def _attention_flops(tokens: int, width: int) -> float:
    """FLOPs of one sample's scores and of its weighted sums of values, over all heads."""
    return 2 * 2 * tokens**2 * width


def bert_base() -> ModelTable:
    """BERT-base, uncased, with its pooler and without a head, on 32 sequences of 128 tokens: 109,482,240 parameters.

    Shapes: Devlin et al., BERT, and `BertModel` of Hugging Face. Pre-training used 128 tokens for 90 % of its steps
    (appendix A.2), and 32 such sequences fit a Titan X with 12 GB.
    """
    tokens, width, inner = 128, 768, 3072
    builder = TableBuilder()
    builder.embedding("embeddings.word", 30522, width, tokens, _WORD_EXPONENT)
    builder.plain("embeddings.position", (512, width))
    builder.embedding("embeddings.token_type", 2, width, tokens)
    builder.norm("embeddings.norm", width, tokens)
    for index in range(12):
        block = f"encoder.{index}"
        for projection in ("query", "key", "value"):
            builder.fc(f"{block}.attention.{projection}", width, width, positions=tokens)
        builder.work(_attention_flops(tokens, width))
        builder.fc(f"{block}.attention.output", width, width, positions=tokens)
        builder.norm(f"{block}.attention.norm", width, tokens)
        builder.fc(f"{block}.intermediate", width, inner, positions=tokens)
        builder.fc(f"{block}.output", inner, width, positions=tokens)
        builder.norm(f"{block}.norm", width, tokens)
    builder.fc("pooler", width, width)  # only the first token
    return _table("BERT-base", builder, 32, "sequence")


def gpt2() -> ModelTable:
    """GPT-2 with 12 blocks on 8 sequences of 1,024 tokens: 124,439,808 parameters.

    The head is the token embedding. So that gradient is complete only when the whole backward pass has ended, and it
    is the first parameter that the next forward pass needs. Shapes: Radford et al., and `GPT2LMHeadModel` of Hugging
    Face.
    """
    vocabulary, tokens, width = 50257, 1024, 768
    builder = TableBuilder()
    builder.embedding("wte", vocabulary, width, tokens, _WORD_EXPONENT)
    builder.plain("wpe", (tokens, width))
    for index in range(12):
        block = f"h.{index}"
        builder.norm(f"{block}.ln_1", width, tokens)
        builder.fc(f"{block}.attn.c_attn", width, 3 * width, positions=tokens)
        builder.work(_attention_flops(tokens, width))
        builder.fc(f"{block}.attn.c_proj", width, width, positions=tokens)
        builder.norm(f"{block}.ln_2", width, tokens)
        builder.fc(f"{block}.mlp.c_fc", width, 4 * width, positions=tokens)
        builder.fc(f"{block}.mlp.c_proj", 4 * width, width, positions=tokens)
    builder.norm("ln_f", width, tokens)
    builder.fc("lm_head", width, vocabulary, positions=tokens, bias=False, shares="wte")
    return _table("GPT-2", builder, 8, "sequence")


def vit_b16() -> ModelTable:
    """ViT-B/16 on 32 images of 224×224, which are 196 patches and a class token: 86,567,656 parameters.

    Shapes: Dosovitskiy et al., and `vit_b_16` of torchvision.
    """
    width, tokens = 768, 197
    builder = TableBuilder()
    builder.conv("conv_proj", (3, 224, 224), width, 16, stride=16)
    builder.plain("class_token", (1, width))
    builder.plain("pos_embedding", (tokens, width))
    for index in range(12):
        block = f"encoder.{index}"
        builder.norm(f"{block}.ln_1", width, tokens)
        builder.fc(f"{block}.attention.in_proj", width, 3 * width, positions=tokens)
        builder.work(_attention_flops(tokens, width))
        builder.fc(f"{block}.attention.out_proj", width, width, positions=tokens)
        builder.norm(f"{block}.ln_2", width, tokens)
        builder.fc(f"{block}.mlp.0", width, 4 * width, positions=tokens)
        builder.fc(f"{block}.mlp.3", 4 * width, width, positions=tokens)
    builder.norm("encoder.ln", width, tokens)
    builder.fc("head", width, 1000)  # only the class token
    return _table("ViT-B/16", builder, 32, "image")


def llama_134m() -> ModelTable:
    """A Llama of GPT-2's size on 8 sequences of 256 tokens: 134,105,856 parameters.

    The head has a weight of its own, so the gradient of the token embedding has only the rows of the batch's tokens.
    Shapes: `LlamaForCausalLM` of Hugging Face, with 12 blocks of width 768, perceptrons of 2,048 and 32,000 words.
    """
    vocabulary, tokens, width, inner = 32000, 256, 768, 2048
    builder = TableBuilder()
    builder.embedding("embed_tokens", vocabulary, width, tokens, _WORD_EXPONENT)
    for index in range(12):
        block = f"layers.{index}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        builder.norm(f"{block}.input_layernorm", width, tokens, bias=False)
        for projection in ("q_proj", "k_proj", "v_proj"):
            builder.fc(f"{attention}.{projection}", width, width, positions=tokens, bias=False)
        builder.work(_attention_flops(tokens, width))
        builder.fc(f"{attention}.o_proj", width, width, positions=tokens, bias=False)
        builder.norm(f"{block}.post_attention_layernorm", width, tokens, bias=False)
        builder.fc(f"{mlp}.gate_proj", width, inner, positions=tokens, bias=False)
        builder.fc(f"{mlp}.up_proj", width, inner, positions=tokens, bias=False)
        builder.fc(f"{mlp}.down_proj", inner, width, positions=tokens, bias=False)
    builder.norm("norm", width, tokens, bias=False)
    builder.fc("lm_head", width, vocabulary, positions=tokens, bias=False)
    return _table("Llama-134M", builder, 8, "sequence")


def _lora(builder: TableBuilder, name: str, in_features: int, out_features: int, tokens: int) -> None:
    """A frozen projection with its two trained factors of rank 16."""
    rank = 16
    builder.fc(f"{name}.lora_A", in_features, rank, positions=tokens, bias=False)
    builder.work(2 * in_features * out_features * tokens)
    builder.fc(f"{name}.lora_B", rank, out_features, positions=tokens, bias=False)


def llama_1b_lora() -> ModelTable:
    """Llama 3.2 1B with LoRA of rank 16 on 8 sequences of 512 tokens: 11,272,192 trained parameters.

    Every projection of a block has LoRA: q, k, v, o, gate, up and down. Nothing else has a gradient: the 1.24 billion
    other parameters are frozen, so backward forms one product where forward forms one. Shapes: the configuration of
    `meta-llama/Llama-3.2-1B` and `LoraConfig` of Hugging Face's peft.
    """
    tokens, width, keys, inner, vocabulary = 512, 2048, 512, 8192, 128256
    builder = TableBuilder()
    for index in range(16):
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        _lora(builder, f"{attention}.q_proj", width, width, tokens)
        _lora(builder, f"{attention}.k_proj", width, keys, tokens)
        _lora(builder, f"{attention}.v_proj", width, keys, tokens)
        builder.work(_attention_flops(tokens, width))
        _lora(builder, f"{attention}.o_proj", width, width, tokens)
        _lora(builder, f"{mlp}.gate_proj", width, inner, tokens)
        _lora(builder, f"{mlp}.up_proj", width, inner, tokens)
        _lora(builder, f"{mlp}.down_proj", inner, width, tokens)
    builder.work(2 * width * vocabulary * tokens)  # the head
    return _table("Llama-1B LoRA", builder, 8, "sequence", forward_share=1 / 2)
