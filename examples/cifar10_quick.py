"""Caffe's "CIFAR-10 quick": three convolutions and two fully-connected layers, 145.6 K parameters, batch 100.

CIFAR-10 is read from a folder with its binary batches; without one, Fashion-MNIST (or digits) is resized to 32×32×3.

    poseidon run -n 4 examples/cifar10_quick.py [--data cifar-10-batches-bin]
    torchrun --nproc-per-node 4 examples/cifar10_quick.py [--ddp]
    python examples/cifar10_quick.py
"""

from __future__ import annotations

import torch
from torch import nn

import common
import datasets


def cifar10_quick() -> nn.Sequential:
    """The network of Caffe's examples/cifar10/cifar10_quick_train_test.prototxt; Caffe rounds pooled sizes up."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = common.picture_parser(__doc__, epochs=8, batch=100, lr=0.01)
    parser.add_argument("--data", help="folder with CIFAR-10's data_batch_*.bin and test_batch.bin")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    data = datasets.load_32x32(args.data, args.dataset)

    model = parallel.DistributedDataParallel(cifar10_quick())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=0.004)
    batches = common.loader(data.train_images, data.train_labels, args.batch, parallel, args.seed)

    common.train(model, optimizer, batches, parallel, args)
    if parallel.rank == 0:
        common.print_accuracy(model, data)
    parallel.shutdown()


if __name__ == "__main__":
    main()
