"""Runs PyTorch's own tests of backends of torch.distributed, on the CPU, with the backend `poseidon`.

    python tests/torch_backend/run.py [--theirs] [-k PATTERN] [-v] [--world-size N] [--record]

Each test runs in processes of its own, under a time limit, so that a hang is a failure. A test that PyTorch runs for
Gloo alone runs here, too: what a test asks of its backend is answered as for Gloo. Prints one line per test that does
not pass, with the reason, and how many do. Tests that not_for_us.txt names must not pass: one that does leaves the
list. `--theirs` runs the tests with Gloo; those that pass then are the reference set, which `--record` writes into
reference.txt, with the world sizes for which they pass.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "torch_ddp"))

from run import listed, make_case, run_one  # noqa: E402

REFERENCE = HERE / "reference.txt"
NOT_FOR_US = HERE / "not_for_us.txt"
TIMEOUT_S = 120


class LikeGloo(str):
    """The name of the backend under test, of which the tests ask whether it is Gloo."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other


def load(world_size: int) -> ModuleType:
    """torch.testing._internal.distributed.distributed_test, for Gloo and that many processes of each test."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT_S),
    )
    sys.argv = sys.argv[:1]  # PyTorch's helpers read options of their own from it
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", action="store_true", help="Gloo, and all tests")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose names this regular expression is in")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="with --theirs: write those that pass to reference.txt")
    parser.add_argument("-v", dest="verbose", action="store_true", help="all that a test prints")
    options = parser.parse_args()
    tests = load(options.world_size)
    base = tests.DistributedTest._DistTestBase
    size = str(options.world_size)
    reference = listed(REFERENCE) if REFERENCE.exists() else {}
    names = [name for name in dir(base) if name.startswith("test_")]
    if not options.theirs:
        names = [name for name in names if size in reference.get(name, "").split()]
        import poseidon.torch  # noqa: F401  # which registers the backend

        tests.BACKEND = LikeGloo("poseidon")  # type: ignore[attr-defined]
    not_for_us = {} if options.theirs else listed(NOT_FOR_US)
    case = make_case(tests)
    passed, wrong = [], []
    for name in (name for name in names if re.search(options.pattern, name)):
        begun = time.monotonic()
        outcome, reason = run_one(case, name, options.verbose)
        if outcome == "passed":
            passed.append(name)
        if (outcome == "passed") == (name in not_for_us) and not options.theirs:
            wrong.append(name)
        if (outcome != "passed" or name in not_for_us) and not (options.theirs and outcome == "skipped"):
            why = f"not for us: {not_for_us[name]}; " if name in not_for_us else ""
            print(f"{outcome} {name} ({time.monotonic() - begun:.1f} s): {why}{reason}", flush=True)
    if options.record:
        sizes = {name: {*reference.get(name, "").split()} - {size} for name in {*reference, *passed}}
        for name in passed:
            sizes[name].add(size)
        lines = [f"{name}: {' '.join(sorted(found))}" for name, found in sorted(sizes.items()) if found]
        REFERENCE.write_text("\n".join(lines) + "\n")
    print(f"{len(passed)} passed, {len(wrong)} not as they should be: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
