"""The features that a training job may have: how each is switched on, and how close to one process the result is.

feature_training.py trains with the settings that `combine` makes of some features, and feature_pairs.py says what every
pair of features does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

EXACT = 3e-4  # of the way that parameters go: sums are made in another order than in one process
NEAR = 2.0  # parameters go about where they go in one process, and no more is promised

_LISTS = ("scheme", "wire", "hooks", "trainer")  # settings of which a job may have several values
_ALONE = ("local", "outer", "streaming")  # trainers that average parameters


@dataclass(frozen=True)
class Feature:
    """One feature.

    `sets`: its settings. `along`: settings without which it has no meaning, unless the other feature has its own.
    `limit`: how far the result may be from that of one process, as a part of the way that the parameters have gone.
    `amplifies`: small differences become larger, so that with another feature that is only near the result may be far.
    """

    name: str
    sets: Mapping[str, Any]
    along: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 0.0
    amplifies: bool = False


WORKER, SERVER = {"trainer": ("worker",)}, {"trainer": ("server",)}

# fmt: off
FEATURES = (
    Feature("stragglers=drop", {"init.stragglers": "drop"}, limit=NEAR),
    Feature("stragglers=drop in time", {"init.stragglers": "drop", "in time": True}),
    Feature("consistency=ssp", {"init.consistency": "ssp"}, SERVER, NEAR),
    Feature("consistency=async", {"init.consistency": "async"}, SERVER, NEAR),
    Feature("on_failure=rejoin", {"init.on_failure": "rejoin"}),
    Feature("on_failure=shrink", {"init.on_failure": "shrink", "init.min_workers": 2}),
    # Who updates.
    Feature("update=worker", WORKER),
    Feature("update=server", SERVER),
    Feature("LocalSGD", {"trainer": ("local",)}),
    Feature("LocalSGD outer", {"trainer": ("outer",)}),
    Feature("LocalSGD streaming", {"trainer": ("streaming",)}, limit=NEAR),
    Feature("second DistributedOptimizer", {"second": True}, WORKER),
    Feature("checkpoint_dir resume", {"init.checkpoint_every": 1, "own.resume": True}, SERVER),
    Feature("aggregator=median", {"own.aggregator": "median"}, SERVER),
    Feature("AdamW", {"optimizer": "adamw"}),
    Feature("LBFGS", {"optimizer": "lbfgs", "closure": True}, limit=0.02, amplifies=True),
    # What the loop does.
    Feature("join", {"join": True}),
    Feature("set_weight", {"weights": True}),
    Feature("no_sync", {"accumulates": True}),
    Feature("closure", {"closure": True}),
    Feature("clip_grad_norm", {"clips": True}),
    Feature("clip=gathered", {"own.max_norm": 0.3, "own.clip": "gathered"}, WORKER),
    Feature("clip=previous", {"own.max_norm": 0.3, "own.clip": "previous"}, WORKER),
    Feature("GradScaler", {"scaler": True}),
    Feature("autocast", {"autocast": True}, limit=0.02),
    Feature("tensor hook", {"tensor hook": True}),
    Feature("accumulate hook", {"accumulate hook": True}),
    # What the model is.
    Feature("torch.compile", {"compiled": True}),
    Feature("checkpointing", {"recomputes": True}),
    Feature("sparse embedding", {"table": "sparse"}),
    Feature("dense embedding", {"table": "dense"}),
    Feature("BatchNorm", {"norm": True}),
    Feature("BatchNorm of each rank", {"norm": True, "wrap.broadcast_buffers": False}),
    Feature("unused parameters", {"unused": True}),
    Feature("several models", {"models": 2}),
    Feature("static_graph", {"wrap.static_graph": True}),
    Feature("bfloat16 model", {"dtype": "bfloat16"}, limit=0.15),
    Feature("float64 model", {"dtype": "float64"}),
    Feature("process_group", {"part": True, "torch": True}),
    Feature("replica", {"replica": True}),  # of a sharded model, with one rank in each
    # Communication hooks.
    Feature("fp16_compress_hook", {"hooks": ("fp16",)}, limit=0.005),
    Feature("bf16_compress_hook", {"hooks": ("bf16",)}, limit=0.02),
    Feature("powerSGD_hook", {"hooks": ("powersgd",)}, limit=0.02),
    Feature("own comm hook", {"hooks": ("own",), "torch": True}),
    # How gradients travel. With these numbers topk and powersgd are exact for the job's gradients.
    Feature("scheme=ps", {"scheme": ("ps",)}),
    Feature("scheme=sfb", {"scheme": ("sfb",)}),
    Feature("scheme=sharded_factors", {"scheme": ("sharded_factors",)}),
    Feature("scheme=project_adam", {"scheme": ("project_adam",)}),
    Feature("scheme=topk", {"scheme": ("topk",)}, {"init.topk_fraction": 1.0}),
    Feature("scheme=onebit", {"scheme": ("onebit",)}, limit=NEAR),
    Feature("scheme=powersgd", {"scheme": ("powersgd",), "init.powersgd_rank": 12}, limit=0.02),
    Feature("lossy=topk", {"init.lossy": "topk"}, {"init.topk_fraction": 0.1}, NEAR),
    Feature("lossy=powersgd", {"init.lossy": "powersgd", "init.powersgd_rank": 12}, limit=0.02),
    Feature("lossy=bf16", {"init.lossy": "bf16"}, limit=0.02),
    Feature("wire=bf16", {"wire": ("bf16",)}, limit=0.02),
    Feature("wire=fp16", {"wire": ("fp16",)}, limit=0.005),
    Feature("wire=int8", {"wire": ("int8",)}, limit=0.05),
    Feature("error_feedback", {"init.error_feedback": "on"}, {"wire": ("int8",), "scheme": ("ps",)}, 0.05),
    Feature("parameter_wire=bf16", {"init.parameter_wire": "bf16"}, SERVER, 0.1),
    Feature("factor_wire=bf16", {"init.factor_wire": "bf16"}, {"scheme": ("sfb",)}, 0.02),
    Feature("revise=off", {"init.revise": "off"}),
    Feature("replica_check=1", {"init.replica_check": 1}),
    Feature("priorities", {"init.priority_threshold": "0.5", "init.priority_classes": 3}, WORKER),
    # Where the workers and servers are, and what is between them.
    Feature("machines", {"by_rank.machine": "aab"}),
    Feature("reduce_by_host=off", {"init.reduce_by_host": "off"}, {"by_rank.machine": "aab"}),
    Feature("racks", {"by_rank.rack": "xxy"}, {"by_rank.machine": "abc"}),
    Feature("dedicated servers", {"servers": True}),
    Feature("transport=tcp", {"init.transport": "tcp"}),
    Feature("transport=shm", {"init.transport": "shm"}),
    Feature("tls", {"init.tls": "on", "secret": True}),
    Feature("chunk_bytes=auto", {"init.chunk_bytes": "auto"}),
    Feature("several cores", {"init.server_cores": 2, "init.worker_cores": 1, "init.flows": 2}),
    Feature("assignment=worker", {"init.assignment": "worker"}, {"init.server_cores": 2}),
    Feature("reduce_order=arrival", {"init.reduce_order": "arrival"}),
)
# fmt: on
BY_NAME = {feature.name: feature for feature in FEATURES}


def combine(names: Iterable[str]) -> dict[str, Any] | None:
    """The settings of a job with these features. None where they want different values of what has only one."""
    found: dict[str, Any] = {}
    features = [BY_NAME[name] for name in names]
    for feature in features:
        for setting, value in feature.sets.items():
            if setting in found and found[setting] != value:
                if setting not in _LISTS:
                    return None
                value = found[setting] + value
            found[setting] = value
    for feature in features:
        for setting, value in feature.along.items():
            found.setdefault(setting, value)
    if sum(trainer in _ALONE for trainer in found.get("trainer", ())) > 1:
        return None
    if found.get("replica") and not _is_sharded_by_torch(found):
        return None
    return found


def _is_sharded_by_torch(settings: Mapping[str, Any]) -> bool:
    """Whether FSDP can do the rest: it passes by hooks of parameters, and knows neither sparse gradients nor LBFGS."""
    beyond = ("tensor hook", "accumulate hook", "torch")  # the last: a world of all ranks, where a replica has its own
    return (
        not any(settings.get(name) for name in beyond)
        and settings.get("table") != "sparse"
        and settings.get("optimizer") != "lbfgs"
    )


def limit(names: Iterable[str]) -> float:
    """How far the result of a job with these features may be from that of one process."""
    chosen = [BY_NAME[name] for name in names]
    total = EXACT + sum(feature.limit for feature in chosen)
    if any(feature.amplifies for feature in chosen):
        return math.inf if total >= NEAR else 3 * total
    return total


def sorted_trainers(settings: Mapping[str, Any]) -> list[str]:
    """Who makes the updates, in the order in which the job makes them: LocalSGD last, because it takes an optimizer."""
    return sorted(settings.get("trainer", ()), key=lambda trainer: trainer in _ALONE)


def with_prefix(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The settings of this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def wrapper_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of DistributedDataParallel."""
    options = with_prefix(settings, "wrap.")
    for what in ("scheme", "wire"):
        if len(settings.get(what, ())) == 2:
            options[what] = dict(zip(("first", "*"), settings[what], strict=True))
    return options


def wraps(settings: Mapping[str, Any]) -> bool:
    """Whether the model is wrapped, because gradients are exchanged, or something of the wrapper's is asked for."""
    others = len(settings.get("trainer", ())) > 1, *(settings.get(name) for name in ("hooks", "join", "part"))
    return not averages(settings) or bool(wrapper_options(settings)) or any(others)


def averages(settings: Mapping[str, Any]) -> bool:
    """Whether the job averages parameters, not gradients."""
    return any(trainer in _ALONE for trainer in settings.get("trainer", ()))
