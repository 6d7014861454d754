"""The program that looks at all machines and the network between them before a run, as `poseidon doctor --before`.

Prints JSON: what is wrong with this machine, and, on rank 0, between the machines.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from poseidon.check.before import UNREACHED, check_before

_RATES_S = 0.2  # for the rates between all
# In so short a time neighbours cannot be told from what starts the check.


def main() -> None:
    """Raises InvalidArgument where the machines do not make a job, and ends with status 1 where one is not reached."""
    own, between = check_before(_RATES_S, looks_for_neighbours=False)
    if unreached := [one.text for one in between if one.about == UNREACHED]:
        sys.exit(unreached[0])
    print(json.dumps({"own": list(map(asdict, own)), "between": list(map(asdict, between))}))


if __name__ == "__main__":
    main()
