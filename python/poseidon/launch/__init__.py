"""Starts N workers on this machine, as `poseidon run` does, and makes sure that none outlives the run.

Each worker has its own session and process group. So Ctrl-C reaches it only through the launcher, and all processes
that it has started can be ended with it. The kernel kills the workers if the launcher itself is killed.
"""

from poseidon.launch.environment import free_port
from poseidon.launch.launcher import launch, run_workers
from poseidon.launch.outcome import Failure, Outcome
from poseidon.launch.run import OnLine
