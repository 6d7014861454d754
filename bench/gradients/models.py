"""Small networks of the kinds whose gradients are sampled. Each layer's name says which kind of layer it is."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 256  # of the transformers: a row of their weights is a block of the coder
CLASSES = 10


class Residual(nn.Module):
    """ResNet's bottleneck: 1×1, 3×3 and 1×1, each with its norm."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.way: nn.Module = nn.Identity()
        if channels != wide:
            self.way = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, images: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(images)))
        inner = functional.relu(self.norm2(self.conv2(inner)))
        return functional.relu(self.norm3(self.conv3(inner)) + self.way(images))


def residual_network() -> nn.Module:
    """A ResNet of six bottlenecks for images of 28×28."""
    stem = [nn.Conv2d(1, 64, 5, 2, 2, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [Residual(64, 32, 1), Residual(128, 32, 1), Residual(128, 64, 2), Residual(256, 64, 1)]
    blocks += [Residual(256, 128, 2), Residual(512, 128, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Convolutional(nn.Module):
    """Convolutions, then two fully connected layers with dropout and a classifier, as AlexNet and VGG19 have them."""

    def __init__(self) -> None:
        super().__init__()
        channels = (1, 32, 64, 128, 256)
        self.convs = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in pairwise(channels))
        self.fc = nn.ModuleList([nn.Linear(256 * 3 * 3, 1024), nn.Linear(1024, 1024)])
        self.head = nn.Linear(1024, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        for index, conv in enumerate(self.convs):
            images = functional.relu(conv(images))
            if index != 2:
                images = functional.max_pool2d(images, 2)
        rows = images.flatten(1)
        for layer in self.fc:
            rows = functional.dropout(functional.relu(layer(rows)), 0.5, self.training)
        return self.head(rows)


class Block(nn.Module):
    """A transformer's block: attention, then a perceptron, each behind a norm and beside the way around it."""

    def __init__(self, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self._causal, self._heads = causal, heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.ModuleDict({"in": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, _ = tokens.shape
        parts = self.attention["in"](self.norm1(tokens)).view(batch, count, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self._causal)
        tokens = tokens + self.attention["out"](mixed.transpose(1, 2).reshape(batch, count, WIDTH))
        return tokens + self.mlp["down"](functional.gelu(self.mlp["up"](self.norm2(tokens))))


class LanguageModel(nn.Module):
    """GPT in small, with a head of its own: the gradients of the embedding and of the head are told apart."""

    def __init__(self, vocabulary: int, context: int, depth: int = 4) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(Block(causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


class VisionTransformer(nn.Module):
    """ViT in small: patches of 4×4 and a class token."""

    def __init__(self, side: int = 28, patch: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class Adapted(nn.Module):
    """A frozen layer with LoRA's two factors."""

    def __init__(self, frozen: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.frozen = frozen
        self.lora_a = nn.Linear(frozen.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, rows: Tensor) -> Tensor:
        return self.frozen(rows) + 2 * self.lora_b(self.lora_a(rows))


def with_adapters(model: nn.Module) -> nn.Module:
    """Freezes `model`, and gives LoRA to the layers of its blocks."""
    model.requires_grad_(False)
    for block in model.modules():
        if isinstance(block, Block):
            for layers in (block.attention, block.mlp):
                for name in list(layers):
                    layer = layers[name]
                    assert isinstance(layer, nn.Linear)
                    layers[name] = Adapted(layer)
    return model


class Clicks(nn.Module):
    """DLRM: a row of each table, numbers through a perceptron, and the dot products of all their vectors."""

    def __init__(self, tables: int, rows: int, numbers: int, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self._pairs = torch.triu_indices(tables + 1, tables + 1, offset=1)
        pair_count = tables * (tables + 1) // 2
        self.mlp = nn.ModuleList([_perceptron(numbers, 512, 256, 64, width), _perceptron(width + pair_count, 512, 256)])
        self.head = nn.Linear(256, 1)
        for table in self.embedding:
            nn.init.normal_(table.get_parameter("weight"), std=0.05)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """`categories`: batch × tables, row numbers. `numbers`: batch × numbers. Returns a score for each click."""
        dense = self.mlp[0](numbers)
        rows = [table(categories[:, index]) for index, table in enumerate(self.embedding)]
        vectors = torch.stack([dense, *rows], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self.head(self.mlp[1](torch.cat([dense, products], 1)))[:, 0]


def _perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
