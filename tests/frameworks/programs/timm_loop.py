"""A loop in the way of timm's own: a residual network and a vision transformer, its optimizers, schedule, averages."""

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, dispatch_clip_grad, distribute_bn, reduce_tensor
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from results import images, save

CLASSES, BATCH, STEPS = 4, 6, 5


def train(name, optimizer_name, rank, **options):
    torch.manual_seed(21)
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    optimizer = create_optimizer_v2(model, opt=optimizer_name, lr=0.01, weight_decay=0.01, momentum=0.9)
    ema = ModelEmaV3(model, decay=0.9)
    model = NativeDDP(model, broadcast_buffers=True)
    scheduler = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-3)
    pictures, labels = images(2 * STEPS * BATCH, CLASSES, size=32)
    losses = AverageMeter()
    model.train()
    for step in range(STEPS):
        part = slice((2 * step + rank) * BATCH, (2 * step + rank + 1) * BATCH)
        loss = torch.nn.functional.cross_entropy(model(pictures[part]), labels[part])
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model.module, step=step)
        losses.update(reduce_tensor(loss.data, 2).item(), BATCH)
        scheduler.step(step + 1)
    for trained in (model, ema):
        distribute_bn(trained, 2, reduce=True)
    if rank == 0:
        print(f"{name}: {losses.avg:.3f}")
    kept = {f"ema.{key}": value for key, value in ema.module.state_dict().items()}
    return {f"{name}.{key}": value for key, value in {**model.module.state_dict(), **kept}.items()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    state = train("resnet10t", "sgd", rank)
    state.update(train("vit_tiny_patch16_224", "adamw", rank, **small))
    save(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
