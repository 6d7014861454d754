"""A script in the way of PyTorch's imagenet example: batch norm, samplers, a schedule, metrics summed over ranks."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from results import images, save

CLASSES, BATCH, EPOCHS = 4, 8, 2


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 16, 2),
        BasicBlock(16, 24, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target):
    return (output.argmax(dim=1) == target).float().mean().item() * 100.0


def train(loader, model, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for pictures, target in loader:
        output = model(pictures)
        loss = criterion(output, target)
        losses.update(loss.item(), pictures.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses.avg


def validate(loader, model, criterion, world_size):
    def run(part):
        with torch.no_grad():
            for pictures, target in part:
                output = model(pictures)
                losses.update(criterion(output, target).item(), pictures.size(0))
                top1.update(accuracy(output, target), pictures.size(0))

    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    run(loader)
    losses.all_reduce()
    top1.all_reduce()
    done = len(loader.sampler) * world_size
    if done < len(loader.dataset):
        rest = Subset(loader.dataset, range(done, len(loader.dataset)))
        run(DataLoader(rest, batch_size=BATCH))
    return losses.avg, top1.avg


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5 + rank)
    model = make_model()
    if torch.cuda.is_available():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(int(os.environ["LOCAL_RANK"]))
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    train_dataset = TensorDataset(*images(64, CLASSES))
    val_dataset = TensorDataset(*images(37, CLASSES))
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, batch_size=BATCH, shuffle=False, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=BATCH, shuffle=False, sampler=val_sampler)
    best = 0.0
    for epoch in range(EPOCHS):
        train_sampler.set_epoch(epoch)
        loss = train(train_loader, model, criterion, optimizer)
        val_loss, acc1 = validate(val_loader, model, criterion, world_size)
        scheduler.step()
        best = max(acc1, best)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.3f}, validation {val_loss:.3f}, {acc1:.1f} %, best {best:.1f} %")
    save(model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
