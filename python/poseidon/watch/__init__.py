"""Shows the workers of this machine, or of several, while they train (docs/watching.md)."""

from poseidon.watch.service import WatchService, fetch
from poseidon.watch.table import Lateness, is_silent, latest_worker, tables
