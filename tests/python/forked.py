"""Where the tests' processes come from: forked from one that has imported PyTorch, which takes seconds each time."""

from __future__ import annotations

from multiprocessing import get_context

FORK = get_context("forkserver")
FORK.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.optim.lr_scheduler", "numpy", "poseidon.torch", "poseidon._core"]
)
