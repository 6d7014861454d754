"""A loop in the way of nanoGPT: switches the exchange by an attribute while it accumulates, clips, evaluates between.

nanogpt_like.py FOLDER [--compile]
"""

import contextlib
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from results import save, text

BLOCK, SYMBOLS, WIDTH, HEADS, LAYERS, BATCH = 16, 29, 32, 4, 2, 4
STEPS, ACCUMULATE, EVAL_EVERY, EVAL_BATCHES = 6, 4, 3, 2
LEARNING_RATE, MIN_RATE, WARMUP, GRAD_CLIP = 1e-3, 1e-4, 2, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, SYMBOLS), targets.view(-1))

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def learning_rate(step):
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / (WARMUP + 1)
    ratio = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_RATE + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (LEARNING_RATE - MIN_RATE)


data = text(2000, SYMBOLS)


def get_batch():
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([data[i : i + BLOCK] for i in starts])
    return x, torch.stack([data[i + 1 : i + 1 + BLOCK] for i in starts])


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(EVAL_BATCHES)]
    model.train()
    return sum(losses) / EVAL_BATCHES


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    master_process = ddp_rank == 0
    assert ACCUMULATE % dist.get_world_size() == 0
    ACCUMULATE //= dist.get_world_size()
else:
    ddp_rank, master_process = 0, True
torch.manual_seed(1337 + ddp_rank)  # so that ranks begin with different parameters: rank 0's count

model = GPT()
optimizer = model.configure_optimizers()
scaler = torch.amp.GradScaler("cpu", enabled=False)
if "--compile" in sys.argv:
    model = torch.compile(model)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

x, y = get_batch()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % EVAL_EVERY == 0 and master_process:  # one rank alone, through the wrapper
        print(f"step {step}: {estimate_loss(model):.4f}")
    for micro_step in range(ACCUMULATE):
        if ddp:
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
        with contextlib.nullcontext():
            _, loss = model(x, y)
            loss = loss / ACCUMULATE
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

save(raw_model.state_dict())
if ddp:
    dist.destroy_process_group()
