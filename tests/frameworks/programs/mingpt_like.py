"""A trainer class in the way of minGPT's distributed example: samplers, snapshots that are resumed from, autocast."""

import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from results import save, text

BLOCK, SYMBOLS, WIDTH = 12, 23, 24


class CharDataset(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, idx):
        chunk = self.data[idx * BLOCK : idx * BLOCK + BLOCK + 1]
        return chunk[:-1], chunk[1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_emb = nn.Embedding(SYMBOLS, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(1, BLOCK, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))

    def forward(self, idx, targets=None):
        x = self.blocks(self.tok_emb(idx) + self.pos_emb, mask=self.mask)
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Trainer:
    def __init__(self, model, optimizer, dataset, snapshot=None):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=8, shuffle=False, sampler=self.sampler)
        self.epochs_run = 0
        self.model = model.to("cpu")
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.snapshot = snapshot
        if snapshot is not None:
            self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        kept = torch.load(io.BytesIO(self.snapshot))
        self.model.load_state_dict(kept["model_state"])
        self.optimizer.load_state_dict(kept["optimizer_state"])
        self.epochs_run = kept["finished_epoch"]

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.amp.autocast(device_type="cpu", enabled=False):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.item()

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        kept = io.BytesIO()
        torch.save(
            {
                "model_state": raw_model.state_dict(),
                "optimizer_state": self.optimizer.state_dict(),
                "finished_epoch": epoch + 1,
            },
            kept,
        )
        self.snapshot = kept.getvalue()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            self._save_snapshot(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets, train=False)
        return self.model.module


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = CharDataset(text(600, SYMBOLS))
    first = GPT()
    trainer = Trainer(first, torch.optim.AdamW(first.parameters(), lr=3e-3, betas=(0.9, 0.95)), dataset)
    trainer.train(1)
    again = GPT()  # as a process that was restarted from the snapshot
    optimizer = torch.optim.AdamW(again.parameters(), lr=3e-3, betas=(0.9, 0.95))
    trained = Trainer(again, optimizer, dataset, trainer.snapshot).train(2)
    save(trained.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
