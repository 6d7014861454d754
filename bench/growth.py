"""Jobs that grow from 2 to 8 workers and shrink to 3, by random histories with kills: do they have the bits of those?

Each history is repeated by jobs in which nobody comes or goes (tests/python/growth_cases.py). Then it measures how long
others stand still for a worker that joins.

    python bench/growth.py --histories 20
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

from growth_cases import Event, random_events, repeat, train  # noqa: E402

_STEPS = 90
_KINDS = (
    ("sgd bufferless", "sfb"),
    ("adam overlap", "ps"),
    ("adam", "ps"),
    ("sgd overlap bufferless", "sharded_factors"),
)
_JOIN_STEP_S = 0.2


def _history(folder: Path, seed: int) -> bool:
    kind, scheme = _KINDS[seed % len(_KINDS)]
    began = time.monotonic()
    trained = train(folder / "job", random_events(seed, 2, 8, 3, _STEPS), 2, 8, _STEPS, kind, scheme)
    expected = repeat(folder, trained.sizes, kind, scheme)
    equal = set(trained.digests.values()) == {expected}
    sizes = "".join(map(str, trained.sizes))
    seconds = time.monotonic() - began
    print(f"{seed:3} {kind:24} {scheme:16} {sizes} {'equal' if equal else 'DIFFERENT'} ({seconds:.0f} s)", flush=True)
    return equal


def _joins(folder: Path) -> None:
    events = [Event(5 * (slot - 1), "start", slot) for slot in range(2, 8)]
    pauses = train(folder / "joins", events, 2, 8, 60, pause_s=_JOIN_STEP_S).pauses_s
    print(
        f"{len(pauses)} pauses of a worker for one that joins: median {statistics.median(pauses):.2f} s, largest "
        f"{max(pauses):.2f} s, which is {max(pauses) / _JOIN_STEP_S:.1f} of its steps; no step is made again"
    )


def main() -> None:
    """Ends with status 1 if some bits are others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    given = parser.parse_args()
    equal = 0
    for seed in range(given.first_seed, given.first_seed + given.histories):
        with tempfile.TemporaryDirectory() as folder:
            equal += _history(Path(folder), seed)
    with tempfile.TemporaryDirectory() as folder:
        _joins(Path(folder))
    print(f"{equal} of {given.histories} histories have the bits of their repetition")
    sys.exit(equal < given.histories)


if __name__ == "__main__":
    main()
