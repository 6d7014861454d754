"""A loop with Hugging Face Accelerate: accumulation by context, clipping, a schedule, metrics gathered from all."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from results import images, save

CLASSES, BATCH, EPOCHS = 4, 6, 2


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),  # before batch norm it has no gradient but noise
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


def train(prepared=None):
    """`prepared`, if given, is called with the prepared model and optimizer."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(9)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)
    train_loader = DataLoader(TensorDataset(*images(66, CLASSES)), batch_size=BATCH, shuffle=True)
    eval_loader = DataLoader(TensorDataset(*images(25, CLASSES)), batch_size=BATCH)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    if prepared is not None:
        prepared(model, optimizer)
    for epoch in range(EPOCHS):
        model.train()
        for pictures, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(pictures), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = total = 0
        for pictures, labels in eval_loader:
            with torch.no_grad():
                guesses = model(pictures).argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right += (guesses == labels).sum().item()
            total += len(labels)
        assert total == 25, total
        accelerator.print(f"epoch {epoch}: {right} of {total} right")
    accelerator.wait_for_everyone()
    save(accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    train()
