"""Hugging Face's Accelerate and Trainer with Poseidon: updates that overlap, and workers that may be lost.

Both make the DistributedDataParallel themselves. Start the program with `poseidon run --drop-in`, or call
`poseidon.torch.replace_ddp()`, so that it is Poseidon's class. `overlap` and `OverlapCallback` put a
`poseidon.DistributedOptimizer` around the optimizer.

For training that goes on when a worker is lost, both must not know of other processes: `init_alone` takes the place of
`poseidon.init`. Then `RecoveryCallback` trains in attempts of a `poseidon.Recovery`, and `recovery_of` makes one for a
loop of the program's own.
"""

from poseidon.torch.hugging_face.alone import init_alone, recovery_of
from poseidon.torch.hugging_face.overlap import OverlapCallback, overlap
from poseidon.torch.hugging_face.recovery_callback import RecoveryCallback

__all__ = ["OverlapCallback", "RecoveryCallback", "init_alone", "overlap", "recovery_of"]
