#!/usr/bin/env python3
"""The loss of DiLoCo between machines with FSDP inside, against FSDP's over all ranks: `python bench/diloco_loss.py`.

Four ranks train a small GPT on a text that can be learnt. FSDP2 shards it over all of them. Or it shards it inside each
of two machines of two ranks, and `LocalSGD` averages the machines every 30 steps with an outer optimizer. Both see the
same number of tokens with the same optimizer. Both begin where FSDP is after `--pretrained` steps, as DiLoCo's authors
begin with a model that was trained before. Printed are the losses on text that was not trained on, for several seeds.
The bar: the mean of DiLoCo's losses is above that of FSDP's by no more than FSDP's spread over the seeds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

METHODS = ("fsdp", "diloco")
EVERY = 30
SYMBOLS, LENGTH, ROWS, WIDTH = 32, 48, 8, 64
RANKS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--pretrained", type=int, default=450, help="steps before those")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    losses: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            if args.pretrained:
                run("fsdp", seed, args.pretrained, state)
            for method in METHODS:
                begin = state if args.pretrained else Path(folder) / method
                losses[method].append(run(method, seed, args.steps, begin))
    for method, found in losses.items():
        print(f"{method:8} {mean(found):.4f} ({', '.join(f'{loss:.4f}' for loss in found)})")
    spread = max(losses["fsdp"]) - min(losses["fsdp"])
    above = mean(losses["diloco"]) - mean(losses["fsdp"])
    print(f"DiLoCo's mean is above FSDP's by {above:.4f} (bar: the spread of FSDP's seeds, {spread:.4f})")
    return 0 if above <= spread else 1


def run(method: str, seed: int, steps: int, state: Path) -> float:
    """The loss that the first rank prints. Training begins with the state, if there is one, or else writes it."""
    command = [sys.executable, "-m", "poseidon", "run", "-n", str(RANKS), __file__, "--worker", method]
    command += ["--seed", str(seed), "--steps", str(steps), "--state", str(state)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return next(float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("loss "))


def text(rows: int, draw: Any) -> Any:
    """Sequences in which each symbol depends on the two before it, but for a tenth of them."""
    import torch

    tokens = torch.randint(0, SYMBOLS, (rows, LENGTH + 1), generator=draw)
    keeps = torch.rand(rows, LENGTH + 1, generator=draw) < 0.1
    for place in range(2, LENGTH + 1):
        following = (3 * tokens[:, place - 1] + tokens[:, place - 2] + 1) % SYMBOLS
        tokens[:, place] = torch.where(keeps[:, place], tokens[:, place], following)
    return tokens


def network() -> Any:
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
                for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, SYMBOLS)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            return self.head(x)  # type: ignore[no-any-return]

    return Model()


def work(args: argparse.Namespace) -> None:
    """Trains as one rank. The first one prints the loss on text that was not trained on."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import poseidon.torch as poseidon

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    over = init_device_mesh("cpu", (RANKS,)) if args.worker == "fsdp" else mesh["shard"]
    model: Any = network()
    begun = args.state.exists()
    dist.barrier()
    if begun:
        model.load_state_dict(torch.load(args.state))
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.worker == "diloco":
        outer = poseidon.OuterNesterov()
        optimizer = poseidon.LocalSGD(model, optimizer, EVERY, outer=outer, device_mesh=mesh["replicate"])
    draw = torch.Generator().manual_seed(1000 * args.seed + 100 * begun + dist.get_rank())
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss_of(text(ROWS, draw)).backward()
        optimizer.step()
    if args.worker == "diloco":
        optimizer.average()
    if not begun:
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(whole, args.state)
    with torch.no_grad():
        loss = loss_of(text(256, torch.Generator().manual_seed(77)))
    if dist.get_rank() == 0:
        print("loss", loss.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
