"""All checks before a run, on this worker. A check of its machine alone gives at most one finding, and none where the
system does not tell.
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from poseidon.check.finding import Finding
from poseidon.check.interfaces import Interface, check_interface, interfaces
from poseidon.check.neighbours import check_neighbours
from poseidon.check.pairs import allow, check_pairs
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.options import resolve
from poseidon.racks.machines import listening_address

_ROUND_TRIP_S = 0.0005  # of a data centre
_USUAL_MBIT = 10_000
_FEWEST_FILES = 4096
# With these drivers `powersave` is the processor's own choice and goes up to the full clock.
_OWN_CHOICE = ("intel_pstate", "amd-pstate", "amd-pstate-epp")
_SLOW_GOVERNORS = ("powersave", "conservative")


def check_files() -> Finding | None:
    """A worker raises its soft limit itself, but not the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FEWEST_FILES:
        return None
    return Finding(
        "file handles",
        f"a process may open {hard} files, and every connection and shared buffer is one",
        "ulimit -Hn 65536   # as root; in a unit of systemd LimitNOFILE=65536",
    )


def check_buffers(root: Path, interface: Interface | None) -> Finding | None:
    """TCP has in flight what its largest buffers hold."""
    mbit = interface.mbit if interface is not None and interface.mbit > 0 else _USUAL_MBIT
    needed = int(2 * mbit * 1e6 / 8 * _ROUND_TRIP_S)  # half of a buffer is the kernel's own bookkeeping
    small = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        sizes = _read(root / "proc/sys/net/ipv4" / name).split()
        if len(sizes) == 3 and int(sizes[2]) < needed:
            small[name] = sizes
    if not small:
        return None
    told = " and ".join(f"{name} to {sizes[2]}" for name, sizes in small.items())
    return Finding(
        "kernel buffers",
        f"the kernel limits {told} bytes; {mbit}mbit with a round trip of 0.5 ms need {needed}",
        "sysctl -w " + " ".join(f'net.ipv4.{name}="{sizes[0]} {sizes[1]} {needed}"' for name, sizes in small.items()),
    )


def check_congestion(root: Path) -> Finding | None:
    """Poseidon chooses Reno in the place of BBR, where it may."""
    folder = root / "proc/sys/net/ipv4"
    name, allowed = _read(folder / "tcp_congestion_control"), _read(folder / "tcp_allowed_congestion_control")
    if not name.startswith("bbr") or "reno" in allowed.split():
        return None
    return Finding(
        "congestion control",
        f"the system's congestion control is {name}, and programs may not choose reno, with which flows of different "
        "urgency share a link as they should",
        f'sysctl -w net.ipv4.tcp_allowed_congestion_control="{allowed} reno"',
    )


def check_frequency(root: Path) -> Finding | None:
    """A governor that keeps the clock low."""
    slow = set()
    for folder in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq")):
        governor = _read(folder / "scaling_governor")
        if governor in _SLOW_GOVERNORS and _read(folder / "scaling_driver") not in _OWN_CHOICE:
            slow.add(governor)
    if not slow:
        return None
    return Finding(
        "CPU frequency",
        f"the governor of the processors' clock is {', '.join(sorted(slow))}, which keeps it low",
        "cpupower frequency-set -g performance",
    )


def check_name(master: str, several_machines: bool) -> Finding | None:
    """Rank 0's name must lead to rank 0 from everywhere, also from its own machine."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return Finding(
            "name of rank 0",
            f"MASTER_ADDR is {master}, which has no address here ({error})",
            f'echo "ADDRESS {master}" >> /etc/hosts   # or set MASTER_ADDR to the address',
        )
    loopback = sorted(address for address in addresses if address.startswith("127.") or address == "::1")
    if not several_machines or not loopback:
        return None
    return Finding(
        "name of rank 0",
        f"MASTER_ADDR is {master}, which is {loopback[0]} here, an address that only this machine reaches",
        "export MASTER_ADDR=ADDRESS   # that of rank 0 in the network: ip -br address; or mend /etc/hosts",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_ROOT = Path("/")
UNREACHED = "reach"  # what a finding is about that says that the job cannot be made


def check_before(seconds: float, looks_for_neighbours: bool = True) -> tuple[list[Finding], list[Finding]]:
    """What is wrong with this machine, and, on rank 0 of a job on several machines, between them.

    `seconds`: for the rates between all. `looks_for_neighbours`: at what else runs here, which takes half
    a second.

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
    if looks_for_neighbours:
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
        return own, [Finding(UNREACHED, str(error), mend)]
    return own, between if settings.rank == 0 else []
