"""Lightning's Trainer with its strategy "ddp": accumulation, clipping, validation with metrics that are averaged."""

import warnings

import lightning as L
import torch
from results import images, save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.classes = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, pictures):
        return self.classes(self.features(pictures))

    def training_step(self, batch, _):
        pictures, labels = batch
        return nn.functional.cross_entropy(self(pictures), labels)

    def validation_step(self, batch, _):
        pictures, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(pictures), labels), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def main():
    warnings.filterwarnings("ignore", category=UserWarning)
    L.seed_everything(13, verbose=False)
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    train_loader = DataLoader(TensorDataset(*images(64, CLASSES)), batch_size=8, shuffle=True)
    trainer.fit(model, train_loader, DataLoader(TensorDataset(*images(24, CLASSES)), batch_size=8))
    assert trainer.world_size == 2
    save(model.state_dict())


if __name__ == "__main__":
    main()
