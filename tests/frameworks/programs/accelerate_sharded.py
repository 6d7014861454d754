"""The calls that Accelerate makes with `fsdp_version: 2` and replicas. Its Accelerator insists on an accelerator."""

import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

from results import images, save

CLASSES = 4


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.relu(self.linear(x))


def prepared(model):
    """As Accelerator.prepare() does."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        parallelism_config=config,
        torch_device_mesh=config.build_device_mesh("cpu"),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


def main():
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = prepared(nn.Sequential(nn.Flatten(), Block(768, 64), Block(64, 64), nn.Linear(64, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pictures, labels = images(64, CLASSES)
    for step in range(4):
        rows = slice(dist.get_rank(), None, dist.get_world_size())
        chosen = torch.randperm(64, generator=torch.Generator().manual_seed(step))[:32][rows]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures[chosen]), labels[chosen]).backward()
        optimizer.step()
    replicas = model._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_process_group
    print("replicas over", dist.get_backend(replicas))
    save({name: parameter.full_tensor() for name, parameter in model.named_parameters()})


if __name__ == "__main__":
    main()
