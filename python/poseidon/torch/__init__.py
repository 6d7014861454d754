"""Poseidon for PyTorch.

In a program:

    import poseidon.torch as poseidon

    poseidon.init()
    model = poseidon.DistributedDataParallel(model)
    opt = poseidon.DistributedOptimizer(opt, model)  # optional: see docs/distributed-optimizer.md
"""

from poseidon.errors import PoseidonError
from poseidon.torch.backend.register import register as _register
from poseidon.torch.backend.urgency import urgency
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.elastic import ElasticLoader, ElasticSampler
from poseidon.torch.local_sgd.averaging import OuterNesterov
from poseidon.torch.local_sgd.local_sgd import LocalSGD
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.process.collectives import all_gather, all_reduce, balance_rows, broadcast, reduce
from poseidon.torch.process.context import barrier, init, rank, scalars, shutdown, straggler_report, world_size
from poseidon.torch.recovery.recovery import Recovery
from poseidon.torch.replace import replace_ddp
from poseidon.torch.replicas import replicate

_register()

__all__ = [
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticLoader",
    "ElasticSampler",
    "LocalSGD",
    "OuterNesterov",
    "PoseidonError",
    "Recovery",
    "all_gather",
    "all_reduce",
    "balance_rows",
    "barrier",
    "broadcast",
    "init",
    "rank",
    "reduce",
    "replace_ddp",
    "replicate",
    "scalars",
    "shutdown",
    "straggler_report",
    "urgency",
    "world_size",
]
