"""Hooks of torch's DDP that need more than it gives them over Gloo."""

# DDP looks at the annotations of a hook, and refuses those that are strings: annotations are not postponed here.

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def bf16_over_gloo(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Does what torch's hook does. DDP refuses that hook without NCCL, by its name, although Gloo can add bfloat16."""
    return bf16_compress_hook(group, bucket)


def powersgd_over_gloo(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Does what torch's hook does, one bucket after the other.

    That hook sends a bucket's second factor from a callback. Gloo's threads would run the callbacks of several buckets
    in another order on each rank. Waiting delays no replayed layer: the accelerator's time goes on.
    """
    reduced = powerSGD_hook(state, bucket)
    reduced.wait()
    return reduced
