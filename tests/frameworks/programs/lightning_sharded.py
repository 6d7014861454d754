"""Lightning's Trainer with its ModelParallelStrategy: FSDP2 over both dimensions of its mesh, one for replicas."""

import warnings

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from results import images, save

CLASSES = 4


class Classifier(lightning.LightningModule):
    def configure_model(self):
        if hasattr(self, "layers"):
            return
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        fully_shard(self.layers[1], mesh=self.device_mesh)
        fully_shard(self.layers, mesh=self.device_mesh)

    def training_step(self, batch, _):
        pictures, labels = batch
        return nn.functional.cross_entropy(self.layers(pictures), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main():
    warnings.filterwarnings("ignore")
    lightning.seed_everything(13, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(TensorDataset(*images(64, CLASSES)), batch_size=8, shuffle=True))
    replicas = module.layers._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_process_group
    print("replicas over", dist.get_backend(replicas))
    save({name: parameter.full_tensor() for name, parameter in module.named_parameters()})


if __name__ == "__main__":
    main()
