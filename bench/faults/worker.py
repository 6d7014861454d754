"""A process of the reliability benchmarks: trains, exchanges or serves, and says on standard output what and when.

Each line is a JSON object with "what" and "at", seconds of the monotonic clock. It ends with whoever holds the other
end of its standard input.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    import poseidon

DIGEST_STEPS = 20  # a digest of the state is said at every multiple
PICTURE, CLASSES, ROWS = 12, 10, 16


def say(what: str, **data: Any) -> None:
    """Tells the benchmark."""
    print(json.dumps({"what": what, "at": time.monotonic(), **data}), flush=True)


def end_with_parent() -> None:
    """Ends this process when its standard input does."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exchange(arguments: argparse.Namespace) -> None:
    """Exchanges an array again and again until the job fails, or some rounds; or nothing more, as if it computed."""
    import poseidon

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        say("told", text=str(message))

    warnings.showwarning = tell
    with poseidon.connect() as here:
        try:
            _exchange(here, arguments)
        except poseidon.PoseidonError as error:
            say("failed", code=error.code, text=str(error))


def _exchange(here: poseidon.Exchange, arguments: argparse.Namespace) -> None:
    import numpy as np

    from poseidon.notices import tell_notices

    here.declare({"w": np.zeros(arguments.bytes // 4, np.float32)})
    gradient = np.ones(arguments.bytes // 4, np.float32)
    here.push_pull("w", gradient)
    say("ready")
    if arguments.rounds:
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(arguments.rounds):
            here.push_pull("w", gradient)
        say("measured", seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu_began)
        return
    while True:
        if arguments.computes:
            time.sleep(0.001)
            tell_notices(here._client)
            if here.failure is not None:
                raise here.failure
        else:
            here.push_pull("w", gradient)


def serve(arguments: argparse.Namespace) -> None:
    """`poseidon server`, until SIGTERM."""
    from poseidon.cli import server
    from poseidon.cli.main import app

    server.print_json = lambda data: say("serving", **data)
    app(["server", "--json", "--port", str(arguments.port)])


def make_model(width: int) -> torch.nn.Module:
    """A small network with everything that recovery has to bring back: factors, buffers, random numbers."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * ((PICTURE - 2) // 2) ** 2, width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


class Batches:
    """Pictures of noise, whose classes a fixed random projection gives; the same for the same numbers."""

    def __init__(self, seed: int) -> None:
        import torch

        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._projection = torch.randn(PICTURE * PICTURE, CLASSES, generator=generator)

    def batch(self, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and classes of one rank's step."""
        import torch

        number = hashlib.blake2b(f"{self._seed} {step} {rank} {world_size}".encode(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(number, "little"))
        inputs = torch.randn(ROWS, 1, PICTURE, PICTURE, generator=generator)
        return inputs, (inputs.flatten(1) @ self._projection).argmax(1)


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters, buffers and the optimizer's tensors, bit for bit."""
    import torch

    digest = hashlib.blake2b(digest_size=8)
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    for tensor in (*model.state_dict().values(), *state):
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def resident_bytes() -> int:
    """The memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def steps_to_do(path: Path) -> int:
    """How many steps the training has: what the file says, without end as long as there is none."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return sys.maxsize


def train(arguments: argparse.Namespace) -> None:
    """Trains until --steps-file says that it is enough, and says which schemes were chosen when."""
    import torch
    from children import Children

    import poseidon.torch as poseidon
    from poseidon.adapter.membership import Membership
    from poseidon.torch.process.context import context

    say("imported")
    meet = Membership.meet

    def meet_and_say(here: Membership) -> None:
        meet(here)
        say("met", generation=here.client.generation if here.client else 0)

    Membership.meet = meet_and_say  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    poseidon.init()
    here = context()
    module = make_model(arguments.width)
    model = poseidon.DistributedDataParallel(module)
    if arguments.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if arguments.optimizer == "overlap":
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    elif arguments.optimizer == "server":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.9)
    batches = Batches(arguments.seed)
    children = Children(arguments.children) if arguments.children else None
    say("prepared")
    recovery = poseidon.Recovery(model, optimizer, scheduler, seed=arguments.seed)
    say("joined", step=recovery.step, world_size=poseidon.world_size())
    if arguments.choices:
        model.replay_choices(json.loads(arguments.choices.read_text()), recovery.step)

    def one_step(step: int) -> float:
        inputs, classes = batches.batch(step, poseidon.rank(), poseidon.world_size())
        if step % DIGEST_STEPS == 0:
            assert here.client is not None
            digest = digest_of(module, optimizer)
            generation = here.client.generation
            say("digest", step=step, generation=generation, value=digest, memory_bytes=resident_bytes())
        if children is not None:
            children.feed()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), classes)
        time.sleep(arguments.pace)  # as if the forward pass took as long
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    while recovery.until(steps_to_do(arguments.steps_file)):
        step, loss = recovery.step, math.nan
        with recovery.attempt():
            try:
                loss = one_step(step)
            except poseidon.PoseidonError as error:
                say("failed", code=error.code, text=str(error))
                raise
        if recovery.step > step:
            say("committed", step=recovery.step, world_size=poseidon.world_size(), loss=loss)
    say("choices", log=model.choices())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    exchanging = modes.add_parser("exchange")
    exchanging.add_argument("--bytes", type=int, default=1 << 20)
    exchanging.add_argument("--rounds", type=int, default=0, help="then end; 0: until the job fails")
    exchanging.add_argument("--computes", action="store_true", help="exchange nothing more once ready")
    training = modes.add_parser("train")
    training.add_argument("--seed", type=int, default=1)
    training.add_argument("--width", type=int, default=64)
    training.add_argument("--optimizer", choices=["sgd", "adam", "overlap", "server"], default="sgd")
    training.add_argument("--pace", type=float, default=0.0, help="seconds that each forward pass takes longer")
    training.add_argument("--children", type=int, default=0, help="workers of a DataLoader, and as many other forks")
    training.add_argument("--steps-file", type=Path, required=True)
    training.add_argument("--choices", type=Path, help="the log of schemes that a run from step 0 takes again")
    serving = modes.add_parser("serve")
    serving.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    say("started")
    faulthandler.register(signal.SIGUSR1)
    end_with_parent()
    {"exchange": exchange, "train": train, "serve": serve}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
