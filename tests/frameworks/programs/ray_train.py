"""launched.py under Ray Train: ray_train.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

sys.path.insert(0, str(Path(__file__).parent))

RANKS = 2


def train(config: dict[str, str]) -> None:
    """What each of Ray's workers runs."""
    sys.path.insert(0, config["programs"])
    import launched

    launched.train(config["folder"])


def main() -> None:
    """Trains on a Ray of this machine alone, and ends it."""
    ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    folder, programs = sys.argv[1], str(Path(__file__).parent)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder, "programs": programs},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
