"""`poseidon bench`: puts the commands of its rooms together."""

from __future__ import annotations

import typer

from poseidon.bench.cluster import cli as cluster
from poseidon.bench.exchange import calibrate
from poseidon.bench.exchange import cli as exchange
from poseidon.bench.paper import cli as paper
from poseidon.bench.priority import cli as priority
from poseidon.bench.suite import cli as suite
from poseidon.bench.training import cli as training

app = typer.Typer(no_args_is_help=True, help="Exchange and training benchmarks, against peers in the same run.")
app.command("exchange", epilog=exchange.EPILOG)(exchange.exchange)
app.command("calibrate", epilog=calibrate.EPILOG)(calibrate.calibrate)
app.command("train", epilog=training.EPILOG)(training.train)
app.command("suite", epilog=suite.EPILOG)(suite.suite)
app.command("cluster", epilog=cluster.EPILOG)(cluster.cluster)
app.command("paper", epilog=paper.EPILOG)(paper.paper)
app.add_typer(priority.app, name="priority")
