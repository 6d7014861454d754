"""VGG11 for 32×32 pictures, a quarter as wide in its convolutions, with two fully-connected layers of 1024.

As in the original, most parameters are in the fully-connected layers and most arithmetic is in the convolutions. So the
large gradients exist first in backward, and much is left to compute while they are sent.

    poseidon run -n 4 examples/vgg.py [--data cifar-10-batches-bin]
    torchrun --nproc-per-node 4 examples/vgg.py [--ddp]
    python examples/vgg.py
"""

from __future__ import annotations

import torch
from torch import nn

import common
import datasets

WIDTHS: list[int | None] = [16, None, 32, None, 64, 64, None, 128, 128, None, 128, 128]  # None: pooling


def vgg() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    classifier = [
        nn.Flatten(),
        nn.Linear(channels * 2 * 2, 1024),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(1024, 10),
    ]
    return nn.Sequential(*layers, *classifier)


def main() -> None:
    parser = common.picture_parser(__doc__, epochs=2, batch=32, lr=0.02)
    parser.add_argument("--data", help="folder with CIFAR-10's data_batch_*.bin and test_batch.bin")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    data = datasets.load_32x32(args.data, args.dataset)

    model = parallel.DistributedDataParallel(vgg())
    torch.manual_seed(args.seed + parallel.rank)  # dropout differs between the workers
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    batches = common.loader(data.train_images, data.train_labels, args.batch, parallel, args.seed)

    common.train(model, optimizer, batches, parallel, args)
    if parallel.rank == 0:
        common.print_accuracy(model, data)
    parallel.shutdown()


if __name__ == "__main__":
    main()
