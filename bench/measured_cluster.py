"""`poseidon bench cluster` on four hosts: are its predictions within the bars?

The hosts are namespaces of this machine with a real sshd each (tests/python/ssh_hosts.py). Needs root, iproute2 and
sshd. Weights are divided by 8 in each dimension, so a port of 156 Mb/s stands for 10 GbE.

    python bench/measured_cluster.py --out found                        # about 6 minutes on two quiet cores
    python bench/measured_cluster.py --models ResNet-50 --out found     # about 1 minute
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))
from poseidon.bench.cluster.task import MODELS
from ssh_hosts import NAMES, ssh_hosts

MEDIAN_BAR, WORST_BAR, PEERS_BAR = 0.02, 0.08, 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--link", default="156mbit", help="rate of each port")
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--slower", type=float, default=1.0, help="computation, beside the scale")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the page and the file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ssh_hosts(Path(folder), args.link) as hosts:
        words = [sys.executable, "-m", "poseidon", "bench", "cluster", "--hosts", ",".join(NAMES), "--ssh", hosts.ssh]
        words += ["--models", args.models, "--scale", str(args.scale), "--slower", str(args.slower)]
        words += ["--out", str(args.out.absolute())]
        subprocess.run(hosts.testbed.command(len(NAMES), words), cwd=hosts.work, check=True)
    steps = json.loads((args.out / "cluster.json").read_text())["steps"]
    own = sorted(abs(step["error"]) for step in steps if not step["method"].startswith("ddp"))
    peers = sorted(abs(step["error"]) for step in steps if step["method"].startswith("ddp"))
    met = median(own) <= MEDIAN_BAR and own[-1] <= WORST_BAR and peers[-1] <= PEERS_BAR
    print(
        f"Poseidon: median error {median(own):.2%}, worst {own[-1]:.2%}; peers: worst {peers[-1]:.2%}; "
        f"bars {'met' if met else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
