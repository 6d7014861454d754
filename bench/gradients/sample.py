"""Trains small networks, and keeps a sample of their gradients' exponents for the replays of `poseidon bench`.

For each family of networks, kind of layer and step it takes stretches of consecutive exponents from random places, and
at each place those of several workers, which have the same parameters and other examples. Of embeddings it takes the
rows that were looked up. Of the fully connected layers that may travel as factors it takes pieces of both factors, too.
It also measures how many bits a value the whole gradients take when coded; `table.py` shows them.

    python bench/gradients/sample.py          # some minutes; writes python/poseidon/gradients/sample.npz
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gradients.trainings import Training, kind_of, trainings
from poseidon.gradients.coded_bits import BLOCK, FORMATS, as_words, coded_bits
from poseidon.gradients.exponents import SAMPLE

STEPS = (0, 40, 200)
WORKERS = 8
STRETCHES, STRETCH = 16, 512  # of each kind and step; values
TRIES = 48  # choices of stretches, of which the one is kept whose bits are nearest to those of the whole gradients
TILES, TILE_ROWS, TILE_COLS = 4, 32, 128  # pieces of factors
LARGEST = 2.0**14  # to which fp16 gradients are scaled up, as training in fp16 does

Gradients = dict[str, NDArray[np.float32]]


class Collected:
    """What becomes the file: exponents and measured bits, by family, kind and step."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps
        self.exponents: dict[str, NDArray[np.uint8]] = {}
        self.bits: dict[str, dict[str, float]] = {}
        self.random = np.random.default_rng(1)

    def add_gradients(self, family: str, step: int, by_worker: list[Gradients]) -> None:
        """Takes the gradients of all workers at one step."""
        kinds = defaultdict(list)
        for name, gradient in by_worker[0].items():
            kinds[kind_of(name, torch.from_numpy(gradient))].append(name)
        largest = max(float(np.abs(gradient).max()) for worker in by_worker for gradient in worker.values())
        scale = 2.0 ** np.floor(np.log2(LARGEST / largest))
        for kind, names in kinds.items():
            key = f"{family}/{kind}/{step}"
            self.bits[key] = _measured(names, by_worker, scale)
            if kind == "embedding":
                self.exponents[key] = self._rows(names, by_worker)
                continue
            length = BLOCK if kind == "vector" else STRETCH
            long = [name for name in names if by_worker[0][name].size >= length]
            if long:
                self.exponents[key] = _exponents(self._stretches(long, by_worker, length))

    def add_factors(self, key: str, by_worker: list[NDArray[np.float32]]) -> None:
        """Takes pieces of one factor (rows of a batch × width) of each worker."""
        height, width = by_worker[0].shape
        rows, cols = max(1, height - TILE_ROWS + 1), max(1, width - TILE_COLS + 1)
        tiles = []
        for _ in range(TILES):
            row, col = self.random.integers(rows), self.random.integers(cols)
            tiles.append([_exponents(one[row : row + TILE_ROWS, col : col + TILE_COLS]) for one in by_worker])
        self.exponents[key] = np.stack([np.stack(tile) for tile in tiles], axis=1)

    def write(self, path: Path) -> None:
        """Writes the file."""
        index = {"workers": WORKERS, "steps": self.steps, "bits": self.bits}
        text = np.frombuffer(json.dumps(index).encode(), np.uint8)
        arrays: dict[str, Any] = {"index": text, **self.exponents}
        np.savez_compressed(path, **arrays)

    def _stretches(self, names: list[str], by_worker: list[Gradients], length: int) -> NDArray[np.float32]:
        """The same places of all workers' gradients: workers × stretches × values."""
        flat = [[gradients[name].reshape(-1) for name in names] for gradients in by_worker]
        places = [(n, at) for n, one in enumerate(flat[0]) for at in range(0, one.size - length + 1, BLOCK)]
        wanted = _bits_of_one_and_mean(flat)
        best, best_distance = None, np.inf
        for _ in range(TRIES):
            chosen = [places[place] for place in self.random.permutation(len(places))[:STRETCHES]]
            taken = np.array([[one[n][at : at + length] for n, at in chosen] for one in flat])
            distance = float(np.abs(_bits_of_one_and_mean(taken) - wanted).sum())
            if distance < best_distance or best is None:
                best, best_distance = taken, distance
        assert best is not None
        return best

    def _rows(self, names: list[str], by_worker: list[Gradients]) -> NDArray[np.uint8]:
        """Rows that each worker looked up, one after the other."""
        taken = []
        for gradients in by_worker:
            rows = np.concatenate([gradients[name][gradients[name].any(axis=1)] for name in names])
            chosen = self.random.integers(len(rows), size=STRETCHES * STRETCH // rows.shape[1])
            taken.append(_exponents(rows[chosen].reshape(STRETCHES, STRETCH)))
        return np.stack(taken)


def _exponents(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return (as_words(values, "fp32") >> 23 & 0xFF).astype(np.uint8)


def _bits_of_one_and_mean(parts: Sequence[Sequence[NDArray[np.float32]]] | NDArray[np.float32]) -> NDArray[np.float64]:
    """Bits a value in fp32: the mean over workers, and those of the workers' mean. `parts` has each worker's arrays."""
    count = sum(part.size for part in parts[0])
    one = sum(coded_bits(part) for worker in parts for part in worker) / len(parts)
    mean = sum(coded_bits(np.asarray(np.mean(same, axis=0, dtype=np.float32))) for same in zip(*parts, strict=True))
    return np.array([one, mean]) / count


def _measured(names: list[str], by_worker: list[Gradients], scale: float) -> dict[str, float]:
    """Bits a value of one worker's gradients and of the workers' mean, in each format, and the share of zeros."""
    one = [gradients[name] for gradients in by_worker for name in names]
    means = (np.mean([gradients[name] for gradients in by_worker], axis=0, dtype=np.float32) for name in names)
    mean = [np.asarray(values) for values in means]
    bits = {}
    for form in FORMATS:
        factor = np.float32(scale if form == "fp16" else 1)
        for name, arrays in ((form, one), (f"mean {form}", mean)):
            coded = sum(coded_bits(np.asarray(values * factor, np.float32), form) for values in arrays)
            bits[name] = coded / sum(values.size for values in arrays)
    bits["zeros"] = sum(int((values == 0).sum()) for values in one) / sum(values.size for values in one)
    return {name: round(value, 3) for name, value in bits.items()}


class Factors:
    """What goes into the fully connected layers of one kind, and the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, NDArray[np.float32]] = {}
        self._hooks = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and (kind := kind_of(name, module.weight)) in ("fc", "head"):
                self._hooks.append(module.register_full_backward_hook(self._hook(kind)))
                self._hooks.append(module.register_forward_pre_hook(self._pre_hook(kind)))

    def remove(self) -> None:
        """Ends watching."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, kind: str):  # type: ignore[no-untyped-def]
        def keep(_: nn.Module, __: object, outputs: tuple[Tensor, ...]) -> None:
            self.seen[f"{kind}.outputs"] = outputs[0].detach().numpy().copy()

        return keep

    def _pre_hook(self, kind: str):  # type: ignore[no-untyped-def]
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.seen[f"{kind}.rows"] = inputs[0].detach().numpy().copy()

        return keep


def sample(training: Training, collected: Collected) -> None:
    """Trains, and collects at the steps that are wanted."""
    model, generator = training.model, torch.Generator().manual_seed(3)
    for step in range(max(collected.steps) + 1):
        if step in collected.steps:
            _collect(training, step, collected, generator)
        training.optimizer.zero_grad()
        loss = training.loss(model, training.batch(generator))
        loss.backward()
        training.optimizer.step()
        if step in collected.steps:
            print(f"{training.family}: step {step}, loss {float(loss.detach()):.3f}", flush=True)


def _collect(training: Training, step: int, collected: Collected, generator: torch.Generator) -> None:
    by_worker: list[Gradients] = []
    factors: dict[str, list[NDArray[np.float32]]] = defaultdict(list)
    with_factors = training.family in ("cnn", "resnet", "vit")
    for _ in range(WORKERS):
        watch = Factors(training.model) if with_factors else None
        training.model.zero_grad()
        training.loss(training.model, training.batch(generator)).backward()
        named = training.model.named_parameters()
        by_worker.append({name: one.grad.numpy().copy() for name, one in named if one.grad is not None})
        if watch is not None:
            watch.remove()
            for kind, values in watch.seen.items():
                factors[kind].append(values.reshape(-1, values.shape[-1]))
    collected.add_gradients(training.family, step, by_worker)
    for kind, parts in factors.items():
        collected.add_factors(f"{training.family}/{kind}/{step}", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SAMPLE)
    parser.add_argument("--families", nargs="+", choices=list(trainings()), default=list(trainings()))
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="of which gradients are kept")
    args = parser.parse_args()
    if "lora" in args.families and "gpt" not in args.families:
        parser.error("lora adapts the trained gpt: give --families gpt lora")
    torch.set_num_threads(1)  # so that sums do not depend on the machine's cores
    collected = Collected(args.steps)
    builders = trainings()
    for family in args.families:
        start = time.monotonic()
        torch.manual_seed(1)  # each family is the same, whichever others are sampled
        collected.random = np.random.default_rng(1)
        sample(builders[family](), collected)
        print(f"{family}: {time.monotonic() - start:.0f} s", flush=True)
    collected.write(args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
