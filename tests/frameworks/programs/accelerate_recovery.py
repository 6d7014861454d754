"""A loop for Accelerate in a job whose workers may be killed: accelerate_recovery.py FOLDER."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import poseidon.torch as poseidon
from poseidon.torch.hugging_face import init_alone, recovery_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from killed_runs import answer, digest, note

WIDE, STEPS = 24, 60


def batch(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(8, WIDE, generator=draw)
    return inputs, inputs[:, :3].tanh()


def main():
    init_alone()
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    layers = [torch.nn.Linear(WIDE, 40), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(40, 3)]
    model = poseidon.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    recovery = recovery_of(accelerator, seed=4)
    while recovery.until(STEPS):
        with recovery.attempt():
            note(recovery.step)
            for part in range(2):
                with accelerator.accumulate(model):
                    inputs, targets = batch(2 * recovery.step + part, poseidon.rank())
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
    state = optimizer.optimizer.state_dict()["state"]
    values = [*model.state_dict().values(), *(part for one in state.values() for part in one.values())]
    made = digest(value.numpy() for value in values)
    answer(poseidon.rank(), {"digest": made, "failures": len(recovery.history), "lr": schedule.get_last_lr()})


if __name__ == "__main__":
    main()
