"""`poseidon racks`: finds the racks of the machines on which it is started."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line
from poseidon.rates import rate_text

EPILOG = "\n\n".join(
    (
        "Example: poseidon racks --seconds 5",
        "On 8 machines: torchrun --nnodes 8 --nproc-per-node 1 --rdzv-endpoint first-machine:29500 --no-python "
        "poseidon racks",
    )
)


def racks(
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="How long all machines send to all others.")] = 3.0,
    json: JsonFlag = False,
) -> None:
    """Finds which machines share a rack, and whether adding up by rack pays.

    Start it on every machine like a training program, with nothing else on the network. All machines send to all
    others at the same time. Machines whose packets share a slow uplink get less from each other. The worker of rank 0
    prints what to set.
    """
    from poseidon.racks.grouping import find_racks
    from poseidon.racks.machines import measure_rates

    rank, hosts, rates = measure_rates(seconds)
    if rank != 0:
        return
    found = find_racks(rates)
    if json:
        labels = None if found is None else [[hosts[machine] for machine in rack] for rack in found.machines]
        result = {"machines": hosts, "bits_per_second": rates, "racks": labels}
        if found is not None:
            result |= {key: value for key, value in asdict(found).items() if key != "machines"} | {"pays": found.pays}
        print_json(result)
        return
    if found is None:
        print_line(f"no racks found: the rates between {len(hosts)} machines show no slow uplinks. Leave `rack` out.")
        return
    print_line(
        f"{len(found.machines)} racks found: while all send to all, a pair of machines has "
        f"{rate_text(found.within)} within a rack and {rate_text(found.between)} between racks."
    )
    for index, rack in enumerate(found.machines):
        print_line(f"  rack r{index}: {', '.join(hosts[machine] for machine in rack)}")
    print_line(f"An exchange of 1 GB takes about {found.flat_s:.2f} s all to all, and {found.by_rack_s:.2f} s by rack.")
    if found.pays:
        print_line(
            'Adding up by rack pays: set rack = "r0" in poseidon.toml (or POSEIDON_RACK=r0) on the machines of rack\n'
            "r0, and so on."
        )
    else:
        print_line("Adding up by rack does not pay here. Leave `rack` out.")
