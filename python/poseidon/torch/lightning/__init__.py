"""Lightning trains with Poseidon: `Trainer(strategy=PoseidonStrategy())`.

from poseidon.torch.lightning import PoseidonStrategy

`RecoveryStrategy` goes on when a worker is lost. Both work with `lightning` and with `pytorch_lightning`, whichever the
program has imported.
"""

from poseidon.torch.lightning.recovery_strategy import RecoveryStrategy, recovery_strategy_class
from poseidon.torch.lightning.strategy import PoseidonStrategy, strategy_class

__all__ = ["PoseidonStrategy", "RecoveryStrategy", "recovery_strategy_class", "strategy_class"]
