"""Lightning's Trainer with its strategy "ddp": accumulation, clipping, validation with metrics that are averaged.

Then once more with a module that calls its optimizer itself.
"""

import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from results import images, save

CLASSES = 4


def make_module(package, manual):
    """A LightningModule of `package`; `manual`: its training_step does all that Trainer would."""

    class Classifier(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual
            self.features = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
            )
            self.classes = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, CLASSES))

        def forward(self, pictures):
            return self.classes(self.features(pictures))

        def training_step(self, batch, _):
            pictures, labels = batch
            loss = nn.functional.cross_entropy(self(pictures), labels)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch, _):
            pictures, labels = batch
            self.log("val_loss", nn.functional.cross_entropy(self(pictures), labels), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    return Classifier()


def fit(package, strategy, manual, **options):
    """The state dict of a module that was trained for two epochs, its keys with what kind it was."""
    warnings.filterwarnings("ignore")
    package.seed_everything(13, verbose=False)
    module = make_module(package, manual)
    trainer = package.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    train_loader = DataLoader(TensorDataset(*images(64, CLASSES)), batch_size=8, shuffle=True)
    trainer.fit(module, train_loader, DataLoader(TensorDataset(*images(24, CLASSES)), batch_size=8))
    assert trainer.world_size == 2
    return {f"manual {manual}: {name}": tensor for name, tensor in module.state_dict().items()}


def main():
    state = fit(lightning, "ddp", manual=False, accumulate_grad_batches=2, gradient_clip_val=0.5)
    state.update(fit(lightning, "ddp", manual=True))
    save(state)


if __name__ == "__main__":
    main()
