"""A small transformer that predicts the next byte of Python's help texts; both embeddings are one tensor.

poseidon run -n 4 examples/transformer.py
torchrun --nproc-per-node 4 examples/transformer.py [--ddp]
python examples/transformer.py
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import common


class LanguageModel(nn.Module):
    """Bytes in (batch × context), scores of the next byte out (batch × context × 256)."""

    def __init__(self, width: int = 128, depth: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.scores.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(context))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: Tensor) -> Tensor:
        embedded = self.tokens(text) + self.positions(self.order)
        return self.scores(self.blocks(embedded, mask=self.mask, is_causal=True))


def windows(context: int) -> tuple[Tensor, Tensor]:
    """The text cut into windows of `context` bytes, and the same one byte further on."""
    text = "".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = (len(data) - 1) // context
    return data[: count * context].view(count, context), data[1 : count * context + 1].view(count, context)


def main() -> None:
    parser = common.parser(__doc__, epochs=2, batch=16, lr=1e-3)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model looks at")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    inputs, targets = windows(args.context)
    held_out = len(inputs) // 20

    model = parallel.DistributedDataParallel(LanguageModel(context=args.context))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batches = common.loader(inputs[held_out:], targets[held_out:], args.batch, parallel, args.seed)

    common.train(model, optimizer, batches, parallel, args)
    if parallel.rank == 0:
        right = common.accuracy(model.module, inputs[:held_out], targets[:held_out], batch=64)
        print(f"help texts: next-byte accuracy {right:.4f} on text not trained on")
    parallel.shutdown()


if __name__ == "__main__":
    main()
