"""What every worker tells about its training while it runs, for those who watch it on its machine (docs/watching.md).

A worker keeps its figures in a file in the memory of its machine. It listens on nothing and waits for nobody.
"""

from poseidon.live.board import Board, read_boards
from poseidon.live.figures import LayerFigures, LinkFigures, WorkerFigures, plain
from poseidon.live.links import LinkMeter, own_addresses
