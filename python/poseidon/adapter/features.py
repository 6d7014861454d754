"""What a job may combine: one table of features, and one function that refuses.

A running job has properties, such as that all ranks are in the same step. Each feature says which properties it needs
and which it breaks. Two features exclude each other if one needs what the other breaks. The properties and the core's
own features stand in include/poseidon/features.def. `FEATURES` adds those of Python. docs/features.md shows it all.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.options import Settings

PROPERTIES: Mapping[str, str] = _core.properties()
"""The name of each property to a sentence that is true unless a feature breaks it."""

SAME_STEP = "same_step"
"""The property on which most behaviour depends."""

Clauses = Mapping[str, str]
"""Properties, each with why a feature needs or breaks it: what a message has after the feature's name."""


@dataclass(frozen=True)
class Feature:
    """One feature. `written` is what users write for it; `{}` in it is the value that they give.

    `remedy` says how to do without it. `unless` has options of Python that give the feature, each with the values that
    do not. A feature without them is one of the core, or a call adds it.
    """

    name: str
    written: str
    needs: Clauses = field(default_factory=dict)
    breaks: Clauses = field(default_factory=dict)
    remedy: str = ""
    unless: Clauses = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> Feature:
        """The feature of a row of the table below."""
        head, *lines, remedy = text.split("\n  ")
        found: dict[str, dict[str, str]] = {"needs": {}, "breaks": {}, "unless": {}}
        for line in lines:
            about, _, why = line.partition(":")
            kind, name = about.split()
            found[kind][name] = why.strip()
        name, _, written = head.partition(": ")
        return Feature(name, written, remedy=remedy.removeprefix("instead: "), **found)


# A row is a feature's name and what users write for it, then a line for each thing known of it, the remedy last.
_PYTHON_FEATURES = """
# Options that the core does not know, or treats alike.
scheme: scheme={}
  unless scheme: auto, ps
  needs gradient_exchange: is a way in which gradients travel
  instead: leave scheme out
rare_scheme: scheme={}
  unless scheme: auto, ps, sfb, sharded_factors
  needs every_scheme: is not among the schemes that every adapter knows
  instead: leave scheme out
lossy: lossy={}
  unless lossy:
  needs gradient_exchange: is a way in which gradients may travel
  needs open_steps: lets layers change to another scheme between steps
  instead: leave lossy out
error_feedback: error_feedback=on
  unless error_feedback: off
  needs kept_rounding: adds what is rounded off to the next gradient
  instead: leave error_feedback out
sequential: schedule=sequential
  unless schedule: wait_free
  needs open_steps: starts exchanges when backward is over
  instead: use schedule=wait_free
replicas: replica={}
  unless replica:
  needs open_steps: has the ranks of each replica agree on every step
  needs gradient_exchange: has a job for each shard, in which its gradients are exchanged
  needs several_worlds: has ranks of several worlds of torch.distributed
  instead: leave replica out, and start all ranks as one job
saved_values: checkpoint_dir={}
  unless checkpoint_dir:
  needs kept_values: has servers save the values that they keep
  instead: leave checkpoint_dir out, and save on the workers
# Frameworks.
jax: poseidon.jax
  breaks open_steps: compiles a step into one program
  breaks every_scheme: knows the schemes auto, ps, sfb and sharded_factors
  breaks kept_rounding: keeps nothing of one compiled step for the next
  breaks kept_values: updates parameters on the workers, and servers keep none
  instead: use poseidon.torch
tensorflow: poseidon.tensorflow
  breaks open_steps: compiles a step into one graph
  breaks kept_values: updates parameters on the workers, and servers keep none
  instead: use poseidon.torch
exchange: poseidon.connect()
  breaks gradient_exchange: pushes whole arrays to the servers that keep them
  breaks kept_rounding: keeps nothing that wire rounds off
  breaks state_survives: has nobody to give a replacement what a lost worker had
  instead: use an adapter, such as poseidon.torch
# Who updates.
distributed_optimizer: DistributedOptimizer
  needs gradient_exchange: has the mean gradient of all ranks in every step
  needs own_exchange: updates parameters as Poseidon brings their gradients
  needs one_backward: updates parameter by parameter after one backward pass
  instead: use the optimizer itself, without DistributedOptimizer
update_worker: update='worker'
  breaks server_updates: makes the updates on the workers
  instead: pass update='server' to DistributedOptimizer
plain_update: the update of parameter {} on the workers
  breaks server_updates: leaves the servers without it
  instead: wrap the optimizer of all parameters in DistributedOptimizer(optimizer, model, update='server')
per_parameter: DistributedOptimizer with update='worker'
  breaks updates_in_step: makes updates that outlive their step
  instead: use the optimizer itself
update_server: update='server'
  needs whole_parameters: has servers that keep whole parameters
  needs kept_values: has servers that keep parameters and optimizer state
  needs dense_gradients: has servers that take dense gradients only
  needs data_everywhere: takes the hyperparameters of rank 0 in every step
  breaks gradient_first: applies gradients as backward gives them, one at a time
  instead: use update='worker'
server_unsaved: update='server' without checkpoint_dir
  breaks state_survives: keeps parameters and optimizer state on servers, which may be lost
  instead: set checkpoint_dir, from which they go on, or use update='worker'
one_version: checkpoint_keep=1 with update='server'
  breaks state_survives: leaves nothing to go back to while the newest checkpoint is written
  instead: keep 2 or more
resume: resume=True
  needs server_updates: takes what servers have saved, and workers load theirs by load_state_dict()
  breaks state_survives: takes what Recovery takes from checkpoint_dir by itself
  instead: leave resume out
scaling_optimizer: {}
  needs common_updates: scales its updates by the size of the gradients of all ranks
  instead: use torch.optim.SGD
lbfgs: {}
  breaks one_backward: makes several backward passes in a step, and needs all gradients together
  instead: use another optimizer
successor: a second DistributedOptimizer for the same parameters
  needs common_updates: takes over parameters that all ranks have alike
  breaks state_survives: takes over from the one that Recovery was given
  instead: make it before Recovery, or start a run of its own with it
max_norm: max_norm
  needs gradient_first: clips by the norm of all gradients before the update
  needs dense_gradients: needs norms, which sparse gradients do not have
  instead: leave max_norm out
clip_previous: clip='previous'
  needs whole_parameters: scales each gradient when it comes, by the norm of all
  needs data_everywhere: needs the norm of the step before, which a rank without data does not have
  breaks state_survives: needs the norm of the step before, which a replacement does not have
  instead: use clip='gathered'
grad_scaler: GradScaler
  needs gradient_first: divides gradients by its scale before the update
  instead: use torch.autocast with bfloat16, which needs no scaling
changed_gradient: a change of {}.grad between backward and step()
  needs gradient_first: is made to the gradient before the update
  instead: clip by max_norm
# How a model is trained.
wrapped: DistributedDataParallel
  needs gradient_exchange: exchanges gradients at every step
  instead: pass the module inside (.module) to LocalSGD, and train that
local_sgd: LocalSGD
  needs same_step: averages on all ranks at once
  needs fixed_ranks: needs what every rank has trained since the last averaging
  breaks gradient_exchange: leaves gradients where they are, and averages parameters
  breaks kept_rounding: keeps nothing that the wire format of pseudo-gradients rounds off
  instead: use DistributedDataParallel instead of LocalSGD
local_sgd_outer: LocalSGD with outer, wire or parameter_wire
  needs kept_values: has servers that keep the global parameters
  breaks plain_averages: makes an update of what an averaging has changed
  breaks server_updates: makes updates on the workers, from one averaging to the next
  instead: leave outer, wire and parameter_wire out
saved_averages: checkpoint_dir with LocalSGD
  needs server_updates: saves what a DistributedOptimizer with update='server' can take up again
  instead: leave checkpoint_dir out, and save state_dict() in the program
second_local_sgd: a second LocalSGD that trains the same model by turns
  needs plain_averages: averages parameters that have been averaged
  instead: give one LocalSGD an optimizer of all parameters
local_sgd_unsaved: LocalSGD in a Recovery without a directory
  breaks state_survives: has a state of its own on every rank, which no other rank can give away
  instead: pass a directory to Recovery, in which each rank saves it
sent_buffers: broadcast_buffers=True with a module that has buffers
  needs same_step: makes all ranks wait for rank 0 before every forward pass
  instead: pass broadcast_buffers=False, and poseidon.broadcast() the buffers when ranks are to agree on them
sparse: parameter {} with sparse gradients
  breaks dense_gradients: has rows in place of a dense gradient
  instead: create the embedding with sparse=False
join: join()
  needs same_step: asks all ranks before every step
  breaks data_everywhere: lets ranks, and rank 0 too, run out of data
  instead: give every rank as many batches
out_of_data: a rank without data in join()
  breaks data_everywhere: helps in the steps of the joined model alone
  instead: give every rank as many batches
other_join: join() of another model
  needs data_everywhere: needs the steps of both models on all ranks
  instead: use torch.distributed.algorithms.Join([model, other]), which joins both
unjoined: a step of another model
  needs data_everywhere: takes all ranks
  instead: use torch.distributed.algorithms.Join([model, other]), which joins both
unjoined_averaging: an averaging of LocalSGD
  needs data_everywhere: takes all ranks
  instead: leave join() out
unjoined_call: a call that takes all ranks, such as barrier()
  needs data_everywhere: waits for all ranks
  instead: call it after join()
set_weight: set_weight()
  needs whole_parameters: weighs each rank's own gradient, and FSDP makes means without weights
  needs same_step: makes a mean over the rows that all ranks have in a step
  needs plain_mean: weighs the ranks in a mean
  needs data_everywhere: takes the weight 0 of ranks without rows
  instead: leave set_weight() out
comm_hook: the communication hook {}
  needs dense_gradients: takes buckets of dense gradients
  breaks own_exchange: exchanges gradients at the end of backward
  breaks plain_mean: knows no weights
  instead: leave register_comm_hook() out
powersgd_hook: powerSGD_hook
  needs same_step: takes a scheme in which every rank waits for all others
  instead: leave the hook out
sharded: a sharded model (DTensors)
  needs own_exchange: has parts of gradients on each rank, which Poseidon exchanges
  needs same_step: has the parts of a parameter in jobs of their own, which know nothing of each other's steps
  breaks whole_parameters: has a part of each parameter on every rank
  instead: train a model whose parameters are whole
# Where workers are, and what becomes of one that is lost.
part: process_group with a part of the ranks
  breaks several_worlds: has ranks of one world of torch.distributed
  breaks state_survives: makes a job of its own, and workers are replaced in jobs of all ranks only
  instead: leave process_group out
torch_group: dist.init_process_group()
  breaks state_survives: makes a group in which torch cannot replace a worker
  instead: leave dist.init_process_group() out
fixed_loop: {}
  needs fixed_ranks: deals the examples of an epoch to the workers with which it began
  instead: write a loop of your own, with ElasticSampler
no_undo: undo=False
  needs updates_in_step: keeps no copies from which an update could be undone
  instead: leave undo out
server_residuals: update='server' with the lossy scheme or wire format of parameter {}
  breaks state_survives: has what was not sent on one rank alone
  instead: use an exact one for it, or no error_feedback
"""

FEATURES: Mapping[str, Feature] = {
    one.name: one
    for one in (
        *(Feature(**row) for row in _core.feature_rows()),
        *(Feature.of(row) for row in re.split(r"\n(?! )", _PYTHON_FEATURES.strip()) if not row.startswith("#")),
    )
}
"""Every feature, by name: those of the core, and those of Python."""


def refusal(one: Feature, other: Feature, values: Mapping[str, str] = {}) -> str:
    """Why the two exclude each other: both as users write them, the reasons and the remedies. Empty if they do not."""
    for needing, breaking in ((one, other), (other, one)):
        for name, why in needing.needs.items():
            if name in breaking.breaks:
                sides = [
                    (_written(needing, values), why, needing.remedy),
                    (_written(breaking, values), breaking.breaks[name], breaking.remedy),
                ]
                return _core.refusal(*sides[0], *sides[1])
    return ""


def _written(feature: Feature, values: Mapping[str, str]) -> str:
    return feature.written.format(values.get(feature.name, "…"))


class Features:
    """The features of a job, or of one of its models or optimizers. Used from the thread that trains.

    A part, such as a model, has what it lies `within`, too. Parts of the same whole know nothing of each other.
    """

    def __init__(self, *names: str, within: Features | None = None) -> None:
        self._within = within
        self._values: dict[str, str] = {}  # of the features that are present
        self._parts: list[weakref.ref[Features]] = []
        for name in names:
            self.add(name)

    @classmethod
    def of(cls, settings: Settings, *more: str) -> Features:
        """Those of a job with these settings, and `more`. Raises InvalidArgument as `add` does."""
        found = cls(*_core.features_of(settings.core()), *more)
        for feature in FEATURES.values():
            for option, usual in feature.unless.items():
                if (value := getattr(settings, option)) not in usual.split(", "):
                    found.add(feature.name, value)
        return found

    def add(self, name: str, value: Any = "") -> None:
        """From now on the feature is present, with the `value` that users give.

        Raises InvalidArgument, and adds nothing, if it and one that is present exclude each other. The text names both,
        why, and what to do.
        """
        if name in self._values:
            return
        self.check(name, value)
        self._values[name] = str(value)

    def check(self, name: str, value: Any = "") -> None:
        """Raises InvalidArgument if `add` would."""
        for present, values in self._all():
            if text := refusal(FEATURES[name], FEATURES[present], {**values, name: str(value)}):
                raise InvalidArgument(text)

    @staticmethod
    def refuse(one: str, other: str, value: str = "") -> NoReturn:
        """Raises the InvalidArgument of two features that exclude each other. `value`: what is given for the first."""
        raise InvalidArgument(refusal(FEATURES[one], FEATURES[other], {one: value}))

    @property
    def parts(self) -> Sequence[Features]:
        """What lies within this, and has not ended."""
        return [part for one in self._parts if (part := one()) is not None]

    def remove(self, name: str) -> None:
        """The feature is not present any more."""
        self._values.pop(name, None)

    def take(self, part: Features) -> None:
        """What is added from now on must go with this part's features, too, as long as somebody holds the part."""
        self._parts = [*(weakref.ref(one) for one in self.parts), weakref.ref(part)]

    def leave(self, part: Features) -> None:
        """The part has ended."""
        self._parts = [weakref.ref(one) for one in self.parts if one is not part]

    def has(self, name: str) -> bool:
        """Whether the feature is present here or in what this lies within."""
        return name in self._values or (self._within is not None and self._within.has(name))

    def keeps(self, name: str) -> bool:
        """Whether the property is true."""
        return self.breaking(name) is None

    def breaking(self, name: str) -> str | None:
        """The feature that breaks the property, as users write it; None if it is true."""
        for present, values in self._here():
            if name in FEATURES[present].breaks:
                return _written(FEATURES[present], values)
        return None

    def _here(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """What is present here and around this, with the values."""
        if self._within is not None:
            yield from self._within._here()
        yield from ((name, self._values) for name in self._values)

    def _inside(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        for part in self.parts:
            yield from ((name, part._values) for name in part._values)
            yield from part._inside()

    def _all(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        yield from self._here()
        yield from self._inside()
