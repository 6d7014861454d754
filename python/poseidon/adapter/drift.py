"""What a job requires of models and optimizers if its ranks may be at different steps.

Ranks may be at different steps with stragglers=drop and with consistency=ssp or async (docs/stragglers.md). Then no
exchange at every step may wait for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.adapter.layer import SyncedLayer
from poseidon.errors import InvalidArgument
from poseidon.options import Settings
from poseidon.schemes import SCHEMES


def ranks_drift(settings: Settings) -> bool:
    """Whether a rank may be ahead of another by a step or more."""
    return settings.stragglers == "drop" or settings.consistency != "bsp"


def drift_option(settings: Settings) -> str:
    """The option because of which ranks may be at different steps, as users write it."""
    return "stragglers=drop" if settings.stragglers == "drop" else f"consistency={settings.consistency}"


def check_options(settings: Settings) -> None:
    """Raises InvalidArgument for options that the core would refuse later, when `Recovery` makes the workers meet."""
    if ranks_drift(settings) and settings.on_failure != "abort":
        raise InvalidArgument(
            f"{drift_option(settings)} and on_failure={settings.on_failure} exclude each other: ranks that are in "
            "different steps cannot repeat one together; use on_failure=abort"
        )


def check_model(settings: Settings, entries: Sequence[SyncedLayer], sends_buffers: bool) -> None:
    """Raises InvalidArgument for a model that such a job cannot train. Chooses the one scheme that it can use."""
    if not ranks_drift(settings):
        return
    if sends_buffers:
        raise InvalidArgument(
            "the module has buffers, which rank 0 would send before every forward pass, so that all wait for the "
            f"slowest: with {drift_option(settings)} pass broadcast_buffers=False, and poseidon.broadcast() them when "
            "ranks are to agree on them"
        )
    for entry in entries:
        check_rounding(settings, entry, entry.wire)
        if entry.asked_scheme != "auto" and not SCHEMES[entry.asked_scheme].can_drop_late:
            raise InvalidArgument(
                f"parameter {entry.name} asks for scheme {entry.asked_scheme}, in which every worker waits for all "
                f"others: with {drift_option(settings)} take scheme='ps' or 'auto'"
            )
        if entry.asked_scheme == "auto":
            entry.ask_for("ps")


def check_rounding(settings: Settings, entry: SyncedLayer, wire: str) -> None:
    """InvalidArgument if gradients in this wire format would keep what servers may leave out."""
    if entry.keeps_rounding_of(wire) and ranks_drift(settings):
        raise InvalidArgument(
            f"parameter {entry.name} has wire {wire} with error_feedback, which {drift_option(settings)} excludes, "
            "because servers may leave out what was sent: leave one of the two out"
        )


def check_optimizer(settings: Settings, on_servers: bool, name: str, is_sgd: bool) -> None:
    """Raises InvalidArgument for an optimizer, called `name`, that does not fit the job's consistency."""
    consistency = settings.consistency
    if consistency == "bsp":
        return
    if not on_servers:
        raise InvalidArgument(
            f"consistency={consistency} needs servers that apply each worker's gradient when it comes: pass "
            "update='server' to DistributedOptimizer, or use consistency=bsp"
        )
    if not is_sgd:
        raise InvalidArgument(
            f"consistency={consistency} makes an update of every worker's gradient, which "
            f"{name} would scale as if it were that of all: use torch.optim.SGD, or consistency=bsp"
        )


def check_stored(settings: Settings, entries: Sequence[SyncedLayer]) -> None:
    """Raises InvalidArgument if servers must update every parameter and do not hold this one."""
    if settings.consistency == "bsp":
        return
    stray = next((entry for entry in entries if not entry.on_servers), None)
    if stray is not None:
        raise InvalidArgument(
            f"parameter {stray.name} is not updated by the servers, as consistency={settings.consistency} needs: wrap "
            "the optimizer of all parameters in DistributedOptimizer(optimizer, model, update='server'), or use "
            "consistency=bsp"
        )


def refuse_join(settings: Settings) -> None:
    """Raises InvalidArgument if join() would make all ranks wait for the slowest at every step."""
    if ranks_drift(settings):
        raise InvalidArgument(
            f"join() and {drift_option(settings)} exclude each other: it asks all ranks before every step, so that all "
            "wait for the slowest; give every rank as many batches, or count steps by DistributedOptimizer.step_count"
        )
