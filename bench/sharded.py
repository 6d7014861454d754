#!/usr/bin/env python3
"""Sharded models with replicas between machines (HSDP), by Poseidon and by torch: `python bench/sharded.py`.

Each machine is a host of a testbed, behind a port, with several ranks. A GPT is sharded among a machine's ranks by
FSDP2, over Gloo, and replicated between the machines: by torch's HSDP over Gloo, or by Poseidon, which also does it
without coding ("plain"), with a bf16 wire, and with a `DistributedOptimizer` ("overlap"). All train the same steps.
Printed are the medians of the step, what a machine's port carried in a step over what it has to, and the ratios of the
steps. The parameters of the exact ones, and of all replicas, are compared. With `--diloco` machines average every 30
steps instead, and the port's bytes of 30 steps are printed. Needs root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

METHODS = ("gloo", "poseidon", "poseidon-plain", "poseidon-bf16", "poseidon-overlap")
EXACT = ("poseidon", "poseidon-plain", "poseidon-overlap")
DILOCO = "diloco"
EVERY = 30
WARM_UP = 2
TIMEOUT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each machine")
    parser.add_argument("--link", default="156mbit", help="of each machine's port")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="of 128 tokens, of each rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--diloco", action="store_true", help=f"average every {EVERY} steps, and count bytes")
    parser.add_argument("--worker", choices=(*METHODS, DILOCO), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    return count_bytes(args) if args.diloco else compare(args)


def count_bytes(args: argparse.Namespace) -> int:
    """Runs one period of DiLoCo, and judges what the port carried. The exit status."""
    from poseidon.testbed import Testbed

    with Testbed(args.machines, args.link, fifo_hosts=True, congestion="system") as testbed:
        share = run(testbed, DILOCO, args)["port_share"]
    print(
        f"{args.machines} machines of {args.ranks} ranks: in {EVERY} steps a port carries {share * EVERY:.4f} of what"
    )
    print("  it has to in each step that exchanges gradients (bar 1.01)")
    return 0 if share <= 1.01 / EVERY else 1


def compare(args: argparse.Namespace) -> int:
    """Runs the methods in turn and judges the bars. The exit status."""
    from poseidon.testbed import Testbed

    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    with Testbed(args.machines, args.link, fifo_hosts=True, congestion="system") as testbed:
        for _ in range(args.repeats):
            for method in METHODS:
                found[method].append(run(testbed, method, args))
    print(f"{args.machines} machines of {args.ranks} ranks behind {args.link}")
    for method, runs in found.items():
        steps = [run["step_s"] for run in runs]
        print(
            f"  {method:15} {median(steps):6.2f} s a step ({', '.join(f'{step:.2f}' for step in steps)}), of which "
            f"{runs[0]['compute_s']:.2f} s without exchange; port {runs[0]['port_share']:.3f} of the closed form"
        )
    digests = {run["digest"] for method in EXACT for run in found[method]}
    steps_s = {method: median(run["step_s"] for run in runs) for method, runs in found.items()}
    ratio, rounded = (steps_s["gloo"] / steps_s[method] for method in ("poseidon", "poseidon-bf16"))
    exchange_s = found["gloo"][0]["step_s"] - found["gloo"][0]["compute_s"]
    bar = 1.3 if found["gloo"][0]["compute_s"] >= 0.2 * exchange_s else 1.15
    share = found["poseidon-plain"][0]["port_share"]
    difference = max(abs(a - b) for a, b in zip(found["gloo"][0]["sums"], found["poseidon"][0]["sums"], strict=True))
    print(f"  step: Gloo's over Poseidon's {ratio:.2f} (bar {bar}), with a bf16 wire {rounded:.2f} (bar 2)")
    print(
        f"  and with overlap {steps_s['gloo'] / steps_s['poseidon-overlap']:.2f}; port, plain: {share:.3f} (bar 1.01)"
    )
    print(f"  parameters: sums differ by {difference:.1e} from Gloo's; {len(digests)} digest of Poseidon's (bar 1)")
    return 0 if ratio >= bar and rounded >= 2 and share <= 1.01 and len(digests) == 1 else 1


def run(testbed: Any, method: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the first rank says of one method."""
    size = args.machines * args.ranks
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % args.ranks),
            "MASTER_ADDR": testbed.hosts[0].address,
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "POSEIDON_CODING": "off" if method in ("poseidon-plain", DILOCO) else "auto",
        }
        argv = [sys.executable, __file__, *sys.argv[1:], "--worker", method]
        output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(testbed.exec(rank // args.ranks, argv, env=environment, stdout=output, text=True))
    try:
        text, _ = processes[0].communicate(timeout=TIMEOUT_S)
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        sys.exit(f"{method} failed: its message is above")
    answer: dict[str, Any] = json.loads(text.splitlines()[-1])
    return answer


def port_bytes() -> int:
    """What this host's port has sent, of whose headers the kernel counts few: it cuts segments of 64 KB afterwards."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def gpt(args: argparse.Namespace, mesh: Any) -> Any:
    """A GPT of so many layers and such a width, sharded over this mesh block by block."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    layer = nn.TransformerEncoderLayer(args.width, 8, 4 * args.width, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
    for block in body.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(nn.Sequential(nn.Embedding(1000, args.width), body, nn.Linear(args.width, 1000)), mesh=mesh)


def work(args: argparse.Namespace) -> None:
    """Trains as one rank. The first one prints what it found."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import poseidon.torch as poseidon

    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (args.machines, args.ranks), mesh_dim_names=("replicate", "shard"))
    model = gpt(args, mesh if args.worker == "gloo" else mesh["shard"])
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    trained: Any
    optimizer: Any
    trained, optimizer, warm_up = model, torch.optim.AdamW(model.parameters(), lr=1e-3), WARM_UP
    if args.worker == DILOCO:
        outer, warm_up, args.steps = poseidon.OuterNesterov(), EVERY, EVERY
        optimizer = poseidon.LocalSGD(model, optimizer, EVERY, outer=outer, device_mesh=mesh["replicate"])
    elif args.worker == "poseidon-overlap":
        trained = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
        optimizer = poseidon.DistributedOptimizer(optimizer, trained)
    elif args.worker != "gloo":
        poseidon.replicate(model, mesh["replicate"], wire="bf16" if args.worker == "poseidon-bf16" else None)
    draw = torch.Generator().manual_seed(dist.get_rank())
    seconds, ports, computes = [], [], []
    for step in range(args.steps + warm_up):
        tokens = torch.randint(0, 1000, (args.rows, 129), generator=draw)
        dist.barrier()
        begun, sent = time.perf_counter(), port_bytes()
        loss = nn.functional.cross_entropy(trained(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if step >= warm_up:
            seconds.append(time.perf_counter() - begun)
            ports.append(port_bytes() - sent)
    # The same without an exchange between the machines: a gradient of the shards alone.
    sharded: Any = model
    sharded.set_requires_gradient_sync(False)
    for _ in range(2):
        begun = time.perf_counter()
        model(tokens[:, :-1]).sum().backward()
        computes.append(time.perf_counter() - begun)
    closed_form = 2 * (args.machines - 1) / args.machines * gradient_bytes
    whole = [parameter.full_tensor().detach() for parameter in sharded.parameters()]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in whole)).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == 1, "replicas differ"
    if dist.get_rank() == 0:
        answer = {"step_s": median(seconds), "compute_s": min(computes), "digest": digest}
        carried = sum(ports) / len(ports) if args.worker == DILOCO else median(ports)
        answer["port_share"] = carried / closed_form
        print(json.dumps({**answer, "sums": [float(tensor.double().sum()) for tensor in whole]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
