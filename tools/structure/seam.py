"""Time, waiting, threads and randomness come from src/base alone, where a simulated world can stand in for them.

Python tests wait by tests/python/waiting.py, which has a deadline for each wait and says what it was for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from structure.tree import Tree

# The files behind which the operating system's stand (docs/decisions/0065-time.md).
SEAM = {Path("src/base") / name for name in ("clock.h", "clock.cc", "thread.h", "thread.cc", "random_bytes.cc")}
PAST_IT = re.compile(
    r"\b(?:steady_clock|system_clock|high_resolution_clock|utc_clock|file_clock|file_time_type::clock::now"
    r"|clock_gettime|gettimeofday|timerfd_\w+|timer_create|nanosleep|usleep|sleep_for|sleep_until"
    r"|condition_variable(?:_any)?|std::(?:thread|jthread|async|future|shared_future|promise|packaged_task|latch|barrier"
    r"|counting_semaphore|binary_semaphore|random_device)|this_thread::|pthread_create|pthread_cond_\w+|sem_wait"
    r"|getrandom|getentropy)\b"
    r"|\b(?:std::)?time\((?:nullptr|NULL|0)\)|(?<!\w)::sleep\("
)

WAITING = Path("tests/python/waiting.py")
SLEEP = re.compile(r"\btime\.sleep\b|(?<![\w.:])sleep\(|\bfrom time import\b.*\bsleep\b")
MOST_SLEEPS = 12
KILL = re.compile(r"\.kill\(\)")
WAITS = re.compile(r"\.(?:wait|join|communicate)\(")
FEWEST_WORDS = 4  # of a reason


def check_sleeps(tree: Tree) -> Iterator[str]:
    """Python tests that sleep without a reason beside it, and their number where it is too large."""
    count = 0
    for path in tree.matching(".py", below="tests"):
        if path == WAITING:
            continue
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            code, _, reason = line.partition("#")
            if SLEEP.search(code):
                count += 1
                if len(reason.split()) < FEWEST_WORDS:
                    yield f"{path}:{number}: wait by {WAITING} for what is needed, or say here why the test sleeps"
    if count > MOST_SLEEPS:
        yield f"tests: {count} sleeps outside {WAITING}, at most {MOST_SLEEPS} are allowed"


def check_kills(tree: Tree) -> Iterator[str]:
    """Python tests that kill a process and do not wait: it may hold a port that the next one is to have."""
    for path in tree.matching(".py", below="tests"):
        lines = tree.text(path).splitlines() if path != WAITING else []
        for number, line in enumerate(lines, 1):
            if KILL.search(line) and not WAITS.search("".join(lines[number : number + 2])):
                yield f"{path}:{number}: end processes by end() of {WAITING}, which waits until they are gone"


def check_seam(tree: Tree) -> Iterator[str]:
    """Lines of the core that go past the seam."""
    for path in tree.matching(".cc", ".h", below="src"):
        if path in SEAM:
            continue
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            if found := PAST_IT.search(line.split("//")[0]):
                yield f"{path}:{number}: {found[0]} goes past base/clock.h, base/thread.h and base/random_bytes.h"
