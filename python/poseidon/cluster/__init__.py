"""Starts the workers of a run on several machines by ssh, as `poseidon run --hosts` does (docs/launchers.md).

On each machine an agent runs for as long as its connection lasts. It starts the workers, passes on what they write, and
ends them when the connection ends. So nothing outlives the command, however it ends. `launcher.py` has the command's
side. This file imports nothing: the agents start sooner so.
"""
