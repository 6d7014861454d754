"""A multilayer perceptron on Fashion-MNIST: nearly all of it is fully connected, so factors are sent, not gradients.

poseidon run -n 4 examples/mlp.py
torchrun --nproc-per-node 4 examples/mlp.py [--ddp]
python examples/mlp.py
"""

from __future__ import annotations

import torch

import common
import datasets


def main() -> None:
    args = common.picture_parser(__doc__, epochs=3, batch=32, lr=0.05).parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    data = datasets.load(args.dataset)

    model = parallel.DistributedDataParallel(common.perceptron())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    batches = common.loader(data.train_images, data.train_labels, args.batch, parallel, args.seed)

    common.train(model, optimizer, batches, parallel, args)
    if parallel.rank == 0:
        common.print_accuracy(model, data)
    parallel.shutdown()


if __name__ == "__main__":
    main()
