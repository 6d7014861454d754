"""What lightning_fit.py does, with PoseidonStrategy and updates that overlap.

lightning_strategy.py FOLDER lightning.pytorch|pytorch_lightning
"""

import importlib
import sys

from lightning_fit import fit
from poseidon.torch.lightning import strategy_class
from results import save


def main():
    package = importlib.import_module(sys.argv[2])
    strategy = strategy_class(sys.argv[2])
    state = fit(package, strategy(overlap=True), manual=False, accumulate_grad_batches=2, gradient_clip_val=0.5)
    state.update(fit(package, strategy(static_graph=True), manual=True))
    save(state)


if __name__ == "__main__":
    main()
