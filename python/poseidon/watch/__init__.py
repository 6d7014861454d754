"""Shows the workers of this machine, or of several, while they train (docs/watching.md)."""

from poseidon.watch.lateness import Lateness, latest_worker
from poseidon.watch.service import WatchService, fetch
from poseidon.watch.table import is_silent, tables
