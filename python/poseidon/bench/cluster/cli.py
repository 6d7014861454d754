"""`poseidon bench cluster`: measures on several machines, by ssh."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from poseidon.bench.cluster.document import Found
from poseidon.bench.cluster.page import write_page
from poseidon.bench.cluster.task import MARK, METHODS, MODELS, Task
from poseidon.bench.training.methods import methods_named
from poseidon.cli.optional import OptionalText
from poseidon.cli.output import JsonFlag, print_json, print_line, written
from poseidon.cluster.hosts import Host, parse_hosts
from poseidon.cluster.launcher import Plan, run_on_hosts
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.models import model_table

EPILOG = "Example: poseidon bench cluster --hosts a,b,c,d --models ResNet-50,GPT-2"
_PROGRAM = ("-m", "poseidon.bench.cluster.worker")
_JSON, _PAGE = "cluster.json", "cluster.html"


def cluster(
    hosts: Annotated[str, typer.Option(metavar="A,B|FILE", help="The machines, as of `poseidon run --hosts`.")],
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    methods: Annotated[str, typer.Option(help="Methods, as of `poseidon bench train`.")] = ",".join(METHODS[1:]),
    scale: Annotated[int, typer.Option(min=1, help="Divisor of weight dimensions, for slow ports and cores.")] = 1,
    slower: Annotated[float, typer.Option(min=0.001, help="Computation takes so many times as long.")] = 1.0,
    device: Annotated[str, typer.Option(help="Whose batch and time computation takes.")] = "titan-x",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each method in a round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the methods take turns.")] = 2,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page and the file to share go.")] = Path(
        "cluster"
    ),
    python: Annotated[OptionalText, typer.Option(help="Python's path on the machines; default: as here.")] = None,
    ssh: Annotated[OptionalText, typer.Option(help="The ssh command, with options.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measures the network between machines, and training of known models on it, beside what the planner predicts.

    It writes a page, and a small file to share, which `poseidon plan --cluster` reads (docs/planning.md). The machines
    need the same Poseidon and torch, as for `poseidon run --hosts`.
    """
    chosen = tuple(model_table(name.strip(), device).name for name in models.split(","))
    compared = tuple(method.name for method in methods_named([name.strip() for name in methods.split(",")]))
    task = Task(chosen, compared, scale, slower, device, steps, rounds)
    parsed = parse_hosts(hosts)
    if any(host.workers not in (None, 1) for host in parsed):
        raise InvalidArgument("one worker of each machine measures its port: give the hosts without numbers of workers")
    if len(parsed) < 2:
        raise InvalidArgument("one machine has no network to measure: give two or more")
    with written("--out", out):
        out.mkdir(parents=True, exist_ok=True)
    found = Found.of(task, _told_by(parsed, task, python or sys.executable, ssh or "ssh"))
    (out / _JSON).write_text(json.dumps(found.to_json(), indent=1) + "\n")
    write_page(found, out / _PAGE)
    if as_json:
        print_json(found.to_json())
        return
    for line in found.words():
        print_line(line)
    for one in found.compared:
        print_line(
            f"{one.step.model}, {one.step.method}: {one.step.step_s:.3f} s, predicted {one.predicted_s:.3f} "
            f"({one.error:+.1%}); efficiency {one.efficiency:.3f}"
        )
    print_line(f"{out / _PAGE}, and to share: {out / _JSON}")


def _told_by(hosts: Sequence[Host], task: Task, python: str, ssh: str) -> list[dict[str, Any]]:
    """What the first machine has said. Raises PoseidonError if the run fails."""
    told: list[dict[str, Any]] = []

    def hear(rank: int, text: str) -> None:
        if text.startswith(MARK):
            told.append(json.loads(text.removeprefix(MARK)))
            names = {step["model"] for step in told[-1].get("steps", [])}
            print(f"measured: {', '.join(names) or 'the network'}", file=sys.stderr)
        else:
            print(f"[{rank}] {text}", file=sys.stderr)

    # torch's store would warn of machines without a name.
    quiet = ["TORCH_CPP_LOG_LEVEL=ERROR"]
    each = [replace(host, workers=1) for host in hosts]
    plan = Plan(each, [*_PROGRAM, task.to_text()], [], python, ssh, environment=quiet)
    outcome = run_on_hosts(plan, {}, hear)
    if outcome.exit_status:
        raise PoseidonError(f"the machines have not measured to the end: exit status {outcome.exit_status}")
    return told
