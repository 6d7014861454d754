"""Lightning trains a small network in a job whose workers may be killed: lightning_recovery.py FOLDER."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

import poseidon.torch as poseidon
from poseidon.torch.lightning import RecoveryStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from killed_runs import answer, digest, note

WIDE = 24


class Numbers(torch.utils.data.Dataset):
    """Inputs of which some are drawn when an example is loaded."""

    def __init__(self, count):
        self.inputs = torch.randn(count, WIDE, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(WIDE), self.inputs[index, :3].tanh()


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDE, 40),
            torch.nn.BatchNorm1d(40),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(40, 3),
        )

    def _loss(self, batch):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, index):
        note(self.global_step)
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self._loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


def main():
    torch.manual_seed(3)
    strategy = RecoveryStrategy(seed=5)
    stopping = EarlyStopping("val", patience=9)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=8,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[stopping, ModelCheckpoint(sys.argv[1], monitor="val", save_top_k=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Net()
    loader = torch.utils.data.DataLoader(Numbers(150), batch_size=4, shuffle=True)
    trainer.fit(model, loader, torch.utils.data.DataLoader(Numbers(40), batch_size=8))
    state = trainer.optimizers[0].state_dict()
    values = [*model.state_dict().values(), *(part for one in state["state"].values() for part in one.values())]
    answer(
        poseidon.rank(),
        {
            "digest": digest(value.numpy() for value in values),
            "failures": len(strategy.recovery.history),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "best": float(stopping.best_score),
            "waited": stopping.wait_count,
            "lr": state["param_groups"][0]["lr"],
        },
    )


if __name__ == "__main__":
    main()
