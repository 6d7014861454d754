"""All checks before a run, on this worker."""

from __future__ import annotations

from pathlib import Path

from poseidon.check.finding import Finding
from poseidon.check.interfaces import check_interface, interfaces
from poseidon.check.machine import check_buffers, check_congestion, check_files, check_frequency, check_name
from poseidon.check.neighbours import check_neighbours
from poseidon.check.pairs import allow, check_pairs
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.options import resolve
from poseidon.racks.machines import listening_address

_ROOT = Path("/")


def check_before(seconds: float) -> tuple[list[Finding], list[Finding]]:
    """What is wrong with this machine, and, on rank 0 of a job on several machines, between them.

    The place in the job comes from the environment, as for training. Raises InvalidArgument where that makes no sense.
    """
    settings = resolve()
    several = settings.world_size > settings.local_world_size
    known = settings.sources["local_world_size"] != "default"
    found = [check_name(settings.master_addr, several and known)] if settings.world_size > 1 else []
    address, used = "", None
    if several and found == [None]:
        address = listening_address(settings)
    if address.startswith("127.") or address == "::1":  # all are on this machine, as the launcher has not said
        address = ""
    if address:
        all_of_them = interfaces()
        used = next((one for one in all_of_them if address in one.addresses), None)
        found.append(check_interface(all_of_them, address))
    found += [check_files(), check_buffers(_ROOT, used), check_congestion(_ROOT), check_frequency(_ROOT)]
    found.append(check_neighbours())
    own = [one for one in found if one is not None]
    if not address:
        return own, []
    try:
        between = check_pairs(address, used, seconds)
    except InvalidArgument:
        raise
    except PoseidonError as error:
        mend = f"{allow(settings.master_addr)}   # and so for all machines, on each of them"
        return own, [Finding("reach", str(error), mend)]
    return own, between if settings.rank == 0 else []
