"""What the table of features and the rules of layers say of a job of feature_training.py, before anybody trains it.

The calls of the job are made on the table alone, in the job's order, by the functions that the calls themselves ask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import poseidon.torch as poseidon
from feature_models import CHANGES_AT, Net, Settings, make_optimizer, size_of, step_count
from feature_training import init_options
from features import sorted_trainers, with_prefix, wrapper_options, wraps
from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument
from poseidon.options import resolve
from poseidon.torch.exchange.comm_hooks import SCHEME as POWERSGD
from poseidon.torch.exchange.comm_hooks import is_open
from poseidon.torch.model.collect import collect_parameters
from poseidon.torch.optimizer.arguments import features_of
from poseidon.torch.optimizer.known import updates_per_parameter
from poseidon.torch.optimizer.rules import algorithm_of, check_aggregator, entries_of

_PART_SIZE = 2
_PLACE = {"rank": 0, "local_rank": 0, "master_addr": "127.0.0.1", "master_port": 29500}


@dataclass(frozen=True)
class Refusal:
    """A refusal: the moment at which it comes on all ranks, and its text."""

    at: str
    text: str


def predicted(settings: Settings) -> Refusal | None:
    """The refusal of a job with these settings; None if it is to train."""
    job = _Job(settings)
    try:
        job.run()
    except InvalidArgument as error:
        return Refusal(job.moment, str(error))
    return None


class _Job:
    """The calls of one rank."""

    def __init__(self, settings: Settings) -> None:
        self._given = settings
        self.moment = "init"

    def run(self) -> None:
        """Makes all calls. Raises InvalidArgument at the first that is refused."""
        given = self._given
        options = init_options(given, 0, Path("FOLDER"), "127.0.0.1:1" if given.get("servers") else "")
        options.pop("secret_file", None)
        size = size_of(given)
        if given.get("replica"):
            options["replica"] = f"0/{size}@127.0.0.1:1"
        self._settings = resolve(**_PLACE, world_size=size, local_world_size=size, **options)
        self._job = Features.of(self._settings)
        self._recovers = self._settings.on_failure != "abort"
        if not self._recovers:
            self._meet()
        if given.get("part"):
            self.moment = "wrap"
            self._settings = self._settings.replace(world_size=_PART_SIZE)
            self._job = Features.of(self._settings, "part")
        models = [_Model(self, given, number) for number in range(given.get("models", 1))]
        self._join(models)
        if self._recovers:
            self.moment = "Recovery"
            for model in models:
                model.recover()
            if given.get("torch"):
                self._job.check("torch_group")
            self._meet()
        for step in range(step_count(given)):
            self.moment = f"step {step}"
            for model in models:
                model.step(step, self._recovers)

    def _meet(self) -> None:
        size = size_of(self._given)
        letters = self._given.get("by_rank.machine", "" if not self._given.get("by_rank.rack") else "abc")[:size]
        groups = self._given.get("by_rank.rack", letters)[:size]
        if len(set(letters)) > 1:
            self._job.add("several_machines")
        adds_up = self._settings.reduce_by_host == "on" and all(
            self._job.keeps(name) for name in ("same_step", "common_updates", "streaming_sums")
        )
        if adds_up and 1 < len(set(groups)) < size:
            self._job.add("sums_of_machines")

    def _join(self, models: Sequence[_Model]) -> None:
        if not self._given.get("join"):
            return
        self.moment = "join"
        for number, model in enumerate(models):
            if number:
                Features.refuse("other_join", "join")
            model.features.add("join")

    @property
    def features(self) -> Features:
        """The job's."""
        return self._job

    @property
    def settings(self) -> Any:
        """The options of the job."""
        return self._settings


class _Parts(nn.Module):
    """A module's parameters as those of a sharded one are collected: without the layers that they belong to."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        for name, param in whole.named_parameters():
            self._parameters[name] = param


class _Model:
    """A model, its wrapper and its optimizers."""

    def __init__(self, job: _Job, given: Settings, number: int) -> None:
        self._job, self._given = job, given
        self._net = Net(given, number)
        self._wraps = wraps(given)
        self.features = Features(within=job.features)
        self._scopes: list[Features] = []
        self.entries: list[Any] = []
        if self._wraps:
            self._wrap(wrapper_options(given))
        job.moment = "optimizer"
        self._optimize()

    def _wrap(self, options: dict[str, Any]) -> None:
        self._job.moment = "wrap"
        self.features.add("wrapped")
        if self._given.get("replica"):
            self.features.add("sharded")
        wishes = options.get("scheme"), options.get("wire")
        module = torch.compile(self._net, backend="eager") if self._given.get("compiled") else self._net
        if self._given.get("replica"):
            module = _Parts(module)
        self.entries = list(collect_parameters(module, *wishes, self._job.settings, ()))
        if self._given.get("norm") and options.get("broadcast_buffers", True):
            self.features.add("sent_buffers")
        self._job.features.take(self.features)
        self._job.moment = "hook"
        for count, hook in enumerate(self._given.get("hooks", ())):
            if count:
                raise InvalidArgument("register_comm_hook was called before, and a model has one hook: call it once")
            self._hook(hook)

    def _hook(self, hook: str) -> None:
        if hook == "own":
            dense = Features(within=self.features)
            for entry in self.entries:
                if entry.form.is_sparse:
                    dense.add("sparse", entry.name)
            dense.check("comm_hook", "_mean_hook")
            self.features.add("comm_hook", "_mean_hook")
        elif hook == "powersgd":
            self.features.add("powersgd_hook")
            found = [entry for entry in self.entries if is_open(entry)]
            if not found:
                raise InvalidArgument(
                    "powerSGD_hook would compress nothing, because a scheme or lossy was given for every parameter: "
                    "leave one of the two out"
                )
            for entry in found:
                if entry.dtype == "float32":
                    entry.check(scheme=POWERSGD, wire=entry.asked.wire, wire_is_given=True)
        else:
            for entry in self.entries:
                if entry.dtype == "float32":
                    entry.check(wire=hook, wire_is_given=True)
            for entry in self.entries:
                if entry.dtype == "float32":
                    entry.wish(wire=hook, wire_is_given=True)

    def _optimize(self) -> None:
        params, trainers = list(self._net.parameters()), sorted_trainers(self._given)
        if set(trainers) == {"worker", "server"}:
            head = {id(param) for param in self._net.last.parameters()}
            self._distribute([param for param in params if id(param) not in head], "worker")
            self._distribute([param for param in params if id(param) in head], "server")
            return
        wrapped = False
        for trainer in trainers:
            if trainer in ("worker", "server"):
                self._distribute(params, trainer)
                wrapped = True
            else:
                self._average(trainer, wrapped)

    def _distribute(self, params: list[Any], update: str) -> None:
        own = with_prefix(self._given, "own.")
        optimizer = make_optimizer(self._given, params)
        trained: Any = SimpleNamespace(
            context=SimpleNamespace(settings=self._job.settings), features=self.features, entries=self.entries
        )
        aggregator = own.get("aggregator", "sum")
        found = features_of(
            optimizer,
            trained,
            update,
            own.get("max_norm"),
            own.get("clip", "gathered"),
            own.get("resume", False),
            aggregator,
        )
        if update == "server":
            algorithm_of(optimizer)
            groups = entries_of(optimizer, self._net, self.entries)
            check_aggregator(aggregator, [entry for group in groups for entry in group])
        elif updates_per_parameter(optimizer, False):
            found.add("per_parameter")
        self.features.take(found)
        self._scopes.append(found)

    def _average(self, trainer: str, wrapped: bool) -> None:
        known = inspect.signature(poseidon.LocalSGD.__init__).parameters
        for name in with_prefix(self._given, "own."):
            if name not in known:
                raise InvalidArgument(f"LocalSGD.__init__() got an unexpected keyword argument '{name}'")
        if wrapped:
            Features.refuse("local_sgd", "distributed_optimizer")
        if self._wraps:
            Features.refuse("local_sgd", "wrapped")
        self.features.add("local_sgd")
        self.entries = list(collect_parameters(self._net, "ps", None, self._job.settings, ()))
        rounds = self._job.settings.parameter_wire != "fp32" or {entry.asked.wire for entry in self.entries} != {"fp32"}
        if trainer == "outer" or rounds:
            self.features.add("local_sgd_outer")
            if self._job.settings.checkpoint_dir:
                self.features.add("saved_averages")
        self._job.features.take(self.features)

    @property
    def _on_servers(self) -> bool:
        return any(scope.has("update_server") for scope in self._scopes)

    def recover(self) -> None:
        """Recovery is given the model and its optimizers."""
        if self._on_servers:
            for entry in self.entries:
                if entry.asked.may_lose:
                    self.features.check("server_residuals", entry.name)

    def step(self, step: int, recovers: bool) -> None:
        """One step of the loop."""
        given = self._given
        if given.get("second") and step == CHANGES_AT:
            if not self.features.keeps("common_updates"):
                self.features.check("successor")
            former, self._scopes = self._scopes, []
            if recovers and any(not scope.has("update_server") for scope in former):
                self._optimize_again()
            for scope in former:
                self.features.leave(scope)
            self._optimize()
        if given.get("weights"):
            self.features.add("set_weight")
        if self._on_servers and given.get("scaler"):
            Features.refuse("grad_scaler", "update_server")
        if self._on_servers and given.get("clips"):
            Features.refuse("changed_gradient", "update_server", "first.weight")

    def _optimize_again(self) -> None:
        self._optimize()
        self.features.check("successor")
