"""Is the planner's advice right? Tries it on random clusters.

Draws clusters at random: a network, its batch, an accelerator's time for a step, 2 to 8 hosts, a rate, and two choices:
two ways of exchanging gradients, or one host alone against all of them. The planner names the better choice before
anything is measured. Then both are replayed on a testbed. The advice is right if the choice that it names is the
faster one, or if the two are a tie: their steps overlap and their medians are within 3 %.

Choices that everybody could tell apart are not drawn, and neither are those that the planner calls equal: it has to say
that one is 3 to 50 % slower. Replays that would take more than half a minute of steps are left out, too. With --record
what was found is appended to a file, and the verdict is over all of the file.

    python bench/advice.py --cells 4 --first 8 --record advice.jsonl      # root and iproute2; under 1 minute a cluster
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from planner import MODELS, SCALE, append, predict, recorded
from poseidon.bench.training.methods import METHODS, Method
from poseidon.bench.training.results import TrainConfig
from poseidon.bench.training.run import run_training

ALONE = METHODS["none"]  # without exchange, each host is one that trains alone
CHOICES = (
    ALONE,
    *(
        METHODS[name]
        for name in ("wfbp-sfb", "wfbp-ps", "poseidon", "overlap", "overlap-ps", "poseidon-bf16", "poseidon-int8")
    ),
)
BATCHES = (8, 32, 128)
HOSTS = (2, 3, 4, 6, 8)
RATES = (30e6, 600e6)  # bits per second, between which rates are drawn
COMPUTE = (0.3, 2.0)  # seconds of a step without exchange, the same
SAMPLE, BAR = 20, 19
GAP = (1.03, 1.5)  # how much longer the planner calls one of the choices
LONGEST = 30.0  # seconds of steps of one replay
STEPS, ROUNDS = 2, 2
_STEPS_IN_ALL = 8  # of one method: measured, and for warming up
_TIE = 0.03


@dataclass(frozen=True)
class Outcome:
    """Two choices: their names, and the predicted and measured seconds in which all hosts' samples are trained."""

    words: str
    choices: tuple[str, str]
    predicted_s: tuple[float, float]
    measured_s: tuple[list[float], list[float]]

    @property
    def medians(self) -> tuple[float, float]:
        """The measured seconds of each choice."""
        first, second = self.measured_s
        return median(first), median(second)

    @property
    def is_tie(self) -> bool:
        """Whether measurements cannot tell the choices apart."""
        first, second = self.measured_s
        overlapping = max(first) >= min(second) and max(second) >= min(first)
        return overlapping and max(self.medians) <= (1 + _TIE) * min(self.medians)

    @property
    def is_right(self) -> bool:
        """Whether the planner names the faster choice."""
        named_first = self.predicted_s[0] <= self.predicted_s[1]
        return self.is_tie or named_first == (self.medians[0] <= self.medians[1])

    def __str__(self) -> str:
        verdict = "a tie" if self.is_tie else "right" if self.is_right else "WRONG"
        each = zip(self.choices, self.predicted_s, self.medians, strict=True)
        return f"{self.words}: {', '.join(f'{name} {said:.3f} s ({was:.3f} s)' for name, said, was in each)}: {verdict}"


def drawn(seed: int, index: int) -> TrainConfig:
    """A cluster at random: the one of this index. The methods are the two choices, and none."""
    generator = random.Random(f"{seed} {index}")
    while True:
        config = _draw(generator)
        seconds = [predicted_s(config, method) for method in config.methods]
        short, long = sorted(seconds[-2:])
        steps = [of_all / _hosts_of(config, method) for of_all, method in zip(seconds, config.methods, strict=True)]
        if _STEPS_IN_ALL * sum(steps) <= LONGEST and GAP[0] <= long / short <= GAP[1]:
            return config


def _draw(generator: random.Random) -> TrainConfig:
    model, batch, hosts = generator.choice(MODELS), generator.choice(BATCHES), generator.choice(HOSTS)
    rate, seconds = _between(generator, RATES), _between(generator, COMPUTE)
    choices = sorted(generator.sample(CHOICES, 2), key=CHOICES.index)
    methods = tuple(choices) if ALONE in choices else (ALONE, *choices)
    options = {"priority_classes": 2, "priority_threshold": "coarse"}
    link = f"{rate / 1e6:.1f}mbit"
    return TrainConfig(model, hosts, link, SCALE, seconds, methods, STEPS, ROUNDS, batch, options=options)


def _between(generator: random.Random, ends: tuple[float, float]) -> float:
    """A number whose logarithm is uniform."""
    return ends[0] * (ends[1] / ends[0]) ** generator.random()


def _hosts_of(config: TrainConfig, method: Method) -> int:
    """How many steps of the method have the samples of one step of all hosts."""
    return config.host_count if method is ALONE else 1


def predicted_s(config: TrainConfig, method: Method) -> float:
    """What the planner says of a choice."""
    if method is ALONE:
        return config.compute_seconds * config.host_count
    return predict(config, method, config.compute_seconds).step_s


def try_advice(config: TrainConfig) -> Outcome:
    """Predicts both choices, and then replays them."""
    first, second = config.methods[-2:]
    said = (predicted_s(config, first), predicted_s(config, second))
    result = run_training(config)

    def measured(method: Method) -> list[float]:
        count = _hosts_of(config, method)
        return [seconds * count for seconds in result.by_name(method.name).step_seconds]

    names = tuple("one host alone" if method is ALONE else method.name for method in (first, second))
    words = (
        f"{config.model}, batch {config.batch}, {config.compute_seconds:.2f} s, {config.host_count} hosts, "
        f"{config.link}"
    )
    return Outcome(words, (names[0], names[1]), said, (measured(first), measured(second)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=SAMPLE, help="how many clusters to try")
    parser.add_argument("--first", type=int, default=0, help="the first of them, from 0")
    parser.add_argument("--seed", type=int, default=1, help="which clusters are drawn")
    parser.add_argument("--record", type=Path, help="append what was found to this file, and judge all of it")
    args = parser.parse_args()
    outcomes = []
    for index in range(args.first, args.first + args.cells):
        outcome = try_advice(drawn(args.seed, index))
        print(outcome, flush=True)
        outcomes.append(outcome)
        if args.record is not None:
            append(args.record, outcome)
    if args.record is not None:
        outcomes = recorded(args.record, Outcome)
    right, ties = sum(outcome.is_right for outcome in outcomes), sum(outcome.is_tie for outcome in outcomes)
    bar = "met" if right * SAMPLE >= BAR * len(outcomes) else "MISSED"
    print(f"{len(outcomes)} clusters: right for {right}, of which {ties} are ties; bar {BAR} of {SAMPLE}: {bar}")


if __name__ == "__main__":
    main()
