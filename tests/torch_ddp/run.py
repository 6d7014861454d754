"""Runs PyTorch's own tests of DistributedDataParallel, on the CPU, with Poseidon's class in the place of PyTorch's.

    python tests/torch_ddp/run.py [--theirs] [-k PATTERN] [-v] [--world-size N] [--record]

Each test runs in processes of its own, under a time limit, so that a hang is a failure. Prints one line per test that
does not pass, with the reason, and how many do. Tests that not_for_us.txt names must not pass: one that does leaves
the list. `--theirs` runs the tests with PyTorch's class; those that pass then are the reference set, which `--record`
writes into reference.txt.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import on_cpu  # noqa: E402

REFERENCE = HERE / "reference.txt"
NOT_FOR_US = HERE / "not_for_us.txt"
TIMEOUT_S = 180.0  # a compiled one takes 15 s on two quiet cores
_CONCERNED = re.compile(r"DistributedDataParallel|SyncBatchNorm")


def listed(file: Path) -> dict[str, str]:
    """Test names of a list and what the list says of each: `name: text` in a line."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


def candidates(tests: ModuleType) -> list[str]:
    """The tests in which DistributedDataParallel takes part, by their source."""
    base = tests.DistributedTest._DistTestBase
    sources = {name: inspect.getsource(inspect.unwrap(f)) for name, f in vars(base).items() if inspect.isfunction(f)}
    concerned = {name for name, source in sources.items() if _CONCERNED.search(source)}
    while True:
        callers = {
            name
            for name, source in sources.items()
            if concerned.intersection(re.findall(r"self\.(_\w+)\(", source)) - {name}
        }
        if callers <= concerned:
            return [name for name in sources if name.startswith("test_") and name in concerned]
        concerned |= callers


def make_case(tests: ModuleType) -> type[unittest.TestCase]:
    """PyTorch's tests, each rank forked from this process."""

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def _spawn_processes(self) -> None:
            self._start_processes(multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            processes = self.processes
            super().tearDown()
            for process in processes:
                process.kill()
                process.join()

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            tests.torch.set_num_threads(1)
            super()._run(rank, test_name, file_name, pipe, **kwargs)

    return Case


def put_class(tests: ModuleType, theirs: bool) -> None:
    """Every module of PyTorch's that holds its class holds the one under test from now on."""
    kind = original = tests.DistributedDataParallel
    if not theirs:
        import poseidon.torch

        kind = poseidon.torch.DistributedDataParallel
    on_cpu.ignore_devices(kind)
    for module in list(sys.modules.values()):
        if module.__name__.startswith("torch.") and vars(module).get("DistributedDataParallel") is original:
            module.DistributedDataParallel = kind  # type: ignore[attr-defined]


def reason_of(report: str) -> str:
    """The error in a test's report, in one line."""
    lines = [line for line in report.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*[A-Z]\w+: ", line)]
    line = next((line for line in errors if not line.startswith("RuntimeError: Process")), (errors or lines)[-1])
    return line[:300]


def run_one(case: type[unittest.TestCase], name: str, verbose: bool) -> tuple[str, str]:
    """("passed" or "skipped" or "failed", the reason)."""
    result = unittest.TestResult()
    with tempfile.TemporaryFile("w+") as log:
        streams = [os.dup(descriptor) for descriptor in (1, 2)]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            case(name).run(result)
        finally:
            for descriptor, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream, descriptor)
                os.close(stream)
        if verbose:
            log.seek(0)
            print(log.read())
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failures = [text for _, text in result.errors + result.failures] + ["unexpected success"] * len(
        result.unexpectedSuccesses
    )
    if not failures:
        return "passed", ""
    if verbose:
        print("\n".join(failures))
    return "failed", reason_of(failures[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", action="store_true", help="PyTorch's own class, all tests that it takes part in")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose names this regular expression is in")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="with --theirs: write those that pass to reference.txt")
    parser.add_argument("-v", dest="verbose", action="store_true", help="all that a test prints")
    options = parser.parse_args()
    tests = on_cpu.load(options.world_size, TIMEOUT_S)
    known = candidates(tests)
    names = known if options.theirs else [name for name in listed(REFERENCE) if name in known]
    not_for_us = {} if options.theirs else listed(NOT_FOR_US)
    put_class(tests, options.theirs)
    case = make_case(tests)
    passed, wrong = [], []
    for name in (name for name in names if re.search(options.pattern, name)):
        begun = time.monotonic()
        outcome, reason = run_one(case, name, options.verbose)
        if outcome == "passed":
            passed.append(name)
        if (outcome == "passed") == (name in not_for_us):
            wrong.append(name)
        if outcome != "passed" or name in not_for_us:
            why = f"not for us: {not_for_us[name]}; " if name in not_for_us else ""
            print(f"{outcome} {name} ({time.monotonic() - begun:.1f} s): {why}{reason}", flush=True)
    if options.record:
        REFERENCE.write_text("\n".join(passed) + "\n")
    print(f"{len(passed)} passed, {len(wrong)} not as they should be: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
