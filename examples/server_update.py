"""Adam on the servers: the workers hold no optimizer state, and the losses are those of the optimizer itself.

poseidon run -n 4 examples/server_update.py
python examples/server_update.py
"""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import OneCycleLR

import common
import datasets


def main() -> None:
    args = common.picture_parser(__doc__, epochs=3, batch=32, lr=0.002).parse_args()
    torch.manual_seed(args.seed)
    parallel = common.connect(args.ddp)
    data = datasets.load(args.dataset)

    model = parallel.DistributedDataParallel(common.perceptron())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if not args.ddp:
        import poseidon.torch as poseidon

        optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
    batches = common.loader(data.train_images, data.train_labels, args.batch, parallel, args.seed)
    rates = OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(batches) + 1)
    optimizer.register_step_post_hook(lambda *_: rates.step())

    common.train(model, optimizer, batches, parallel, args)
    if parallel.rank == 0:
        common.print_accuracy(model, data)
        if not args.ddp:
            held = optimizer.memory()
            print(f"optimizer state: {held.this_process:,} bytes here, {held.worker_side:,} with a worker-side update")
    parallel.shutdown()


if __name__ == "__main__":
    main()
