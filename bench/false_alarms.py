#!/usr/bin/env python3
"""Whether a busy machine makes workers say of each other that they are silent: `python bench/false_alarms.py`.

Workers exchange a small array again and again while other processes keep the machine's cores busy. None of them is
stopped, so each notice of silence is a false alarm. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time

from faults.job import FaultJob, FaultJobError

START_SECONDS = 300.0


def busy_process() -> subprocess.Popen[bytes]:
    """A process that takes whatever a core gives it."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def watch(job: FaultJob, seconds: float) -> list[str]:
    """What the workers were told. FaultJobError if one of them fails or ends."""
    alarms = []
    deadline = time.monotonic() + seconds
    while (event := job.next_event(deadline - time.monotonic())) is not None:
        if event.what in ("failed", "ended"):
            raise FaultJobError(f"slot {event.slot} has ended{job.report()}")
        if event.what == "told" and "rank " in event.data["text"]:
            alarms.append(event.data["text"])
    return alarms


def main() -> int:
    """Prints the alarms and their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--load", type=int, default=20, help="busy processes beside the workers")
    parser.add_argument("--minutes", type=float, default=120.0)
    arguments = parser.parse_args()
    options = {"timeout": 600.0, "transport": "tcp"}
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(FaultJob(arguments.ranks, ["exchange"], options))
        job.start_all()
        job.wait_for("ready", range(arguments.ranks), START_SECONDS)
        for _ in range(arguments.load):
            stack.callback(busy_process().kill)
        alarms = watch(job, 60 * arguments.minutes)
    for text in alarms:
        print(text)
    print(f"{len(alarms)} false alarms in {arguments.minutes:g} minutes at load {arguments.load} (bar: 0)")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
