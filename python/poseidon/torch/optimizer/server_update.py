"""Updates on the servers: they hold the parameters and the optimizer's state, workers push gradients.

`ServerUpdate` is one optimizer's part of a model's `Synchronizer`, which pushes each gradient as its
backward ends and receives the updated parameter into its own memory (Parameter Hub §3.1, §3.2.2).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.restore import restore
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.model.parameters import Rereads, SyncedParameter
from poseidon.torch.model.stored_parameter import StoredParameter, hold_other_values
from poseidon.torch.optimizer.rules import Algorithm, GroupMembers
from poseidon.torch.optimizer.succession import Tenure
from poseidon.torch.tensors.compatibility import increment_version
from poseidon.torch.tensors.memory import borrowed, exchangeable, flat_view, same_bits
from poseidon.torch.tensors.pending_gradient import GradientGone

States = Mapping[torch.Tensor, Mapping[str, Any]]
"""An optimizer's state by parameter, as torch keeps it."""


class ServerUpdate:
    """The updates of one optimizer's parameters. Used from the thread that trains.

    `groups` has the parameters of each group of `optimizer`, whose hyperparameters rank 0 tells
    the servers before the push of a step that uses them. It exchanges nothing before `connect`.
    `shows_means`: every update is made of a mean over all ranks, which `.grad` shows afterwards. `flights`: the end of
    backward does not wait for the parameters, and these wait for each when it is used. `aggregator` names what makes
    this mean of the ranks' gradients.
    """

    exclusive = True
    _client: _core.Client
    _control: Control

    def __init__(
        self,
        algorithm: Algorithm,
        groups: Sequence[list[SyncedParameter]],
        optimizer: Optimizer,
        shows_means: bool,
        tenure: Tenure,
        aggregator: str = "sum",
        flights: Flights | None = None,
    ) -> None:
        self.tenure = tenure
        self.algorithm = algorithm
        self.connected = False
        self.backward_count = 0  # synchronizing ones since `Recovery` has set it to 0
        self._optimizer, self._groups, self._flights = optimizer, groups, flights
        self._rules: list[_core.UpdateRule | None] = [None] * len(groups)
        self._has_values = False  # the servers have parameters
        self._updated = False  # by a backward whose step() is yet to come
        self._shows_means = shows_means
        self._aggregator = aggregator
        self._step = 0  # distinguishes this step's means from those that the servers no longer have
        self._looked = False  # at one of this step's
        self._rereads = Rereads()
        for entry in self.entries:
            entry.rereads = self._rereads
            entry.update_by(None if flights is None else self)
        on_servers: dict[torch.Tensor, str] = {entry.param: entry.name for entry in self.entries}
        self._members = GroupMembers(optimizer.param_groups, on_servers)
        self._frozen = [
            (param, group, f"parameter {index} of group {number}")
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group.get("params", ()))
            if param not in on_servers
        ]

    def connect(self, client: _core.Client, control: Control, has_values: bool = False) -> None:
        """The servers are those of this client, to which the layers have been added; what others were told is past.

        `has_values`: they hold parameters already, of an earlier optimizer.
        """
        self._client, self._control, self.connected = client, control, True
        self._rules, self._updated, self._has_values = [None] * len(self._groups), False, has_values
        self._step += 1

    def disconnect(self) -> None:
        """Until the next `connect` there are no servers. State that is loaded meanwhile stays on this worker."""
        self.connected = False

    def end(self, kept: Collection[SyncedParameter]) -> None:
        """See `Update`. The caller then adds the layers of the others again."""
        for entry in self.entries:
            _stored(entry).before_addition()
        for entry in self.entries:
            if entry.updater is self:
                entry.update_by(None)
            if entry not in kept:
                entry.leave_servers()
        self._step += 1

    @property
    def entries(self) -> list[SyncedParameter]:
        """All parameters, in the order of the groups."""
        return [entry for group in self._groups for entry in group]

    # Of a step, in the order in which a training loop meets them.

    def check_forward(self) -> None:
        """PoseidonError if a forward pass would not see the parameters of the last step()."""
        if self._updated:
            raise PoseidonError(
                "a forward pass came between backward and step(): the servers have updated the parameters already; "
                "call step() after every synchronizing backward, and accumulate gradients under no_sync()"
            )
        self._check_unchanged()

    def _check_unchanged(self, looks_at_values: bool = False) -> None:
        here = [entry for entry in self.entries if not self._in_flight(entry)]
        looks_at_values = looks_at_values and hold_other_values(map(_stored, here))
        changed = [entry for entry in here if _stored(entry).changed_here(looks_at_values)]
        if not changed:
            return
        for entry, host in self._pulled(changed, 0).items():
            # What was written may be what it was, as where a checkpoint's optimizer is loaded before its model.
            own = entry.param.detach().cpu()
            held = _rounded(host) if entry.asked.parameter_wire == "bf16" else host
            if own.dtype != host.dtype or not torch.equal(own, held):
                raise PoseidonError(
                    f"parameter {entry.name} was changed on this worker, not by an update: call push_parameters() of "
                    "the DistributedOptimizer on every rank after loading or editing the model's parameters"
                )
            _stored(entry).received()

    def begin(self) -> None:
        """A synchronizing backward has begun: tells the servers hyperparameters that have changed."""
        if self._updated:
            raise PoseidonError(
                "a second backward came before step(): the servers updated the parameters with the first one's "
                "gradients; call step() in between, or accumulate gradients under no_sync()"
            )
        self._members.check(self._optimizer.param_groups)
        # The forward pass may have gone past the wrapper. Values may be others only for an evaluation, but not now.
        self._check_unchanged(looks_at_values=True)
        for entry in self.entries:
            _stored(entry).before_addition()
        self._step += 1
        for index, param_group in enumerate(self._optimizer.param_groups):
            rule, last = self._rule(param_group), self._rules[index]
            if last is not None and last == rule:
                continue
            if rule.state_count and param_group.get("dampening") and any(map(_lacks_momentum, self._groups[index])):
                raise InvalidArgument(
                    f"parameter group {index} got a momentum after updates without one, and has a dampening: "
                    "servers cannot start a momentum buffer then; set the momentum from the start, or dampening=0"
                )
            for entry in self._groups[index]:
                self._client.set_rule(entry.layer, rule, compared=False)  # hyperparameters are, by their names
            self._rules[index] = rule

    def finished(self, updated: Collection[SyncedParameter], in_flight: Collection[SyncedParameter] = ()) -> None:
        """Backward has ended; `updated` are the parameters that got an update, those `in_flight` get one later."""
        own = [entry for entry in self.entries if entry in updated]
        reached = dict.fromkeys(entry for entry in own if self._shows_means and _stored(entry).is_reached())
        for group, rule in zip(self._groups, self._rules, strict=True):
            assert rule is not None
            for entry in group:
                stored = _stored(entry)
                stored.note_gradient()
                if entry in updated or entry in in_flight:
                    stored.updated(rule.state_count)
                    if entry not in reached:
                        self._show_mean(entry)
        self._rereads.end()
        self._write_means(list(reached))
        self._updated, self._looked = True, False
        self.backward_count += 1

    def step(self) -> None:
        """The optimizer's step(): PoseidonError unless what the servers did is what it would do now."""
        self._members.check(self._optimizer.param_groups)
        if not self._updated and self._only_makes_state():
            for group, param_group in zip(self._groups, self._optimizer.param_groups, strict=True):
                for entry in group:
                    _stored(entry).state_count = self._rule(param_group).state_count
            return
        if not self._updated:
            for entry in self.entries:
                if entry.param.grad is not None:
                    raise PoseidonError(
                        "step() without a synchronizing backward since the last one: the servers update during "
                        "backward, so gradients that it did not push (under no_sync(), by hand) have no effect: "
                        "call step() after a backward that synchronizes"
                    )
            return
        for index, (param_group, used) in enumerate(zip(self._optimizer.param_groups, self._rules, strict=True)):
            if self._rule(param_group) != used:
                raise PoseidonError(
                    f"hyperparameters of parameter group {index} changed between backward and step(): the servers "
                    "have used the former ones; change them before backward, as schedulers called after step() do"
                )
        if changed := [entry for entry in self.entries if _stored(entry).gradient_changed()]:
            self._check_equal(changed)
        self._check_frozen()
        self._updated = False
        if self._flights is not None:
            self._flights.note_thread()
            # The program may have made others that have their memory since backward.
            self._flights.settle_exposed(list(filter(self._in_flight, self.entries)))

    def _in_flight(self, entry: SyncedParameter) -> bool:
        return self._flights is not None and self._flights.in_flight(entry) is not None

    def synchronize(self) -> None:
        """Waits until all parameters are as the last step() is to leave them."""
        if self._flights is not None:
            self._flights.settle(self.entries)

    def _check_frozen(self) -> None:
        """PoseidonError if the optimizer would change a parameter that was frozen when the servers took the others.

        It does where a gradient is left, even one of zeros: it decays the weight.
        """
        for param, group, what in self._frozen:
            if param.grad is not None and (float(group.get("weight_decay", 0)) != 0 or bool(param.grad.any())):
                raise PoseidonError(
                    f"{what} was frozen when the model was wrapped and has a gradient all the same, which servers do "
                    "not apply: clear it (param.grad = None), or leave the parameter out of the optimizer"
                )

    def _only_makes_state(self) -> bool:
        """Whether step() is to change nothing, as where torch's distributed checkpoints call it to make state."""
        grads = [entry.param.grad for entry in self.entries if entry.param.grad is not None]
        still = all(float(param_group["lr"]) == 0 for param_group in self._optimizer.param_groups)
        return still and bool(grads) and not any(bool(grad.any()) for grad in grads)

    def _rule(self, param_group: Mapping[str, Any]) -> _core.UpdateRule:
        return self.algorithm.rule(param_group, self._shows_means, self._aggregator)

    # The mean gradients of the last step.

    def _show_mean(self, entry: SyncedParameter) -> None:
        if not self._shows_means:
            return
        step, name, update, of = self._step, entry.name, weakref.ref(self), weakref.ref(entry)

        def fetch() -> torch.Tensor:
            here, shown = update(), of()
            if here is None or shown is None or step != here._step:
                raise GradientGone(
                    f"the gradient of {name} that is read is that of an earlier step, which the servers no longer "
                    "have: read it before the next backward pass, and keep a clone if you need it later, or clear it"
                )
            return here._fetch_mean(shown)

        def may_zero() -> bool:
            here = update()
            return here is None or not here._updated

        _stored(entry).show_mean(fetch, may_zero)

    def _write_means(self, entries: Sequence[SyncedParameter]) -> None:
        """Makes gradients the means where they lie, as the program may read, change or clear them past `.grad`."""
        for entry, mean in (self._pull_means(entries) if entries else {}).items():
            _stored(entry).write_mean(mean)
        for entry in entries:  # parts of one tensor have one version
            _stored(entry).note_mean()

    def _fetch_mean(self, entry: SyncedParameter) -> torch.Tensor:
        # Who looks at a second one will look at all; to ask for each alone would take as many round trips.
        wanted = [other for other in self.entries if self._looked and _stored(other).shows_stand_in()]
        self._looked = True
        means = self._pull_means(dict.fromkeys([entry, *wanted]))
        for other, mean in means.items():
            _stored(other).show_fetched(mean)
        return means[entry]

    def _pull_means(self, entries: Iterable[SyncedParameter]) -> dict[SyncedParameter, torch.Tensor]:
        with torch.inference_mode(False):  # they are to have version counters, wherever they are looked at
            hosts = self._pulled(entries, _core.GRADIENT_ARRAY)
            return {entry: host.to(entry.param.device) for entry, host in hosts.items()}

    def _check_equal(self, entries: Sequence[SyncedParameter]) -> None:
        """InvalidArgument unless the gradients of these parameters, which were written to, are what they were."""
        means = self._pull_means(entries) if self._shows_means else {}
        for entry in entries:
            grad, mean = entry.param.grad, means.get(entry)
            if grad is None or mean is None or not same_bits(grad, mean):
                Features.refuse("changed_gradient", "update_server", entry.name)
            _stored(entry).show_fetched(grad)

    # State.

    def pull_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The optimizer's state as torch would hold it on a worker. Not collective: any rank may call it."""
        names = self.algorithm.state_names
        states: dict[torch.Tensor, dict[str, Any]] = {}
        for entry in self.entries:
            if _stored(entry).state_count:
                states[entry.param] = self._count_state(_stored(entry).update_count)
        for number, name in enumerate(names, start=1):
            having = [entry for entry in self.entries if _stored(entry).state_count >= number]
            for entry, host in self._pulled(having, number).items():
                states[entry.param][name] = host.to(entry.param.device)
        return states

    def _count_state(self, update_count: int) -> dict[str, Any]:
        if not self.algorithm.counts_steps:
            return {}
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # as torch does
        return {"step": torch.tensor(float(update_count), dtype=dtype)}

    def load_states(self, states: States, keep_digits: bool = False) -> None:
        """Collective: makes `states` the optimizer's state. Every rank passes the same; rank 0's arrays are taken.

        The servers take rank 0's parameters, too. `keep_digits`: not those that are here as the last step brought them.
        """
        for entry in self.entries:
            state = states.get(entry.param, {})
            arrays = [state[name] for name in self.algorithm.state_names if state.get(name) is not None]
            for array in arrays:
                if array.shape != entry.param.shape:
                    raise InvalidArgument(
                        f"the state of parameter {entry.name} has shape {tuple(array.shape)}, the parameter "
                        f"{tuple(entry.param.shape)}: load the checkpoint of the same model"
                    )
            _stored(entry).state_count = len(arrays)
        self._publish(states, keep_digits)

    def resume(self, states: States) -> int:
        """Collective: every rank gets what the servers' newest checkpoint has, and its version is returned.

        Where they have none, 0, and `states` and rank 0's parameters are taken as by `load_states`.
        """
        version = restore(self._client, self.restorable()) if self._client.rank == 0 else 0
        (version,) = self._control.sum([version])
        if version == 0:
            self.load_states(states)
        else:
            self.take_restored()
        return version

    def restorable(self) -> list[tuple[str, int, torch.Tensor]]:
        """What `poseidon.restore` is to have the servers take from their checkpoints."""
        return [(entry.name, entry.layer, flat_view(entry.new_buffer("cpu"))) for entry in self.entries]

    def take_restored(self) -> None:
        """The servers have been given a checkpoint's values: the parameters become these."""
        self._pull_parameters()
        self._take_over()
        for group, param_group in zip(self._groups, self._optimizer.param_groups, strict=True):
            state_count = self._rule(param_group).state_count
            for entry in group:
                _stored(entry).state_count = state_count if _stored(entry).update_count else 0

    def push_parameters(self) -> None:
        """Collective: the servers and all ranks take over rank 0's parameters; the optimizer's state stays."""
        self._publish(self.pull_states() if self._client.rank == 0 else {}, keep_digits=True)

    def pull_parameters(self) -> None:
        """Collective: every rank takes over the servers' parameters, as they are when all have called it."""
        if self._updated:
            raise PoseidonError("pull_parameters() came between backward and step(): call it after step()")
        self.synchronize()
        self._control.barrier()  # nobody pushes any more
        self._pull_parameters(rounded=False)
        self._control.barrier()  # nor again before all have pulled
        self._take_over()

    def _publish(self, states: States, keep_digits: bool) -> None:
        self.synchronize()
        self._control.barrier()  # a rank that is behind may still push
        if self._client.rank == 0:
            self._assign(states, self._kept_masters() if keep_digits and self._has_values else {})
            self._pull_parameters()  # also waits until the servers have the assignments, which nobody acknowledges
        self._control.barrier()
        if self._client.rank != 0:
            self._pull_parameters()
        self._take_over()

    def _take_over(self) -> None:
        """The parameters are what has just been received."""
        self._has_values = True
        for entry in self.entries:
            _stored(entry).update_count = self._client.layer_stats(entry.layer).update_count
            _stored(entry).received()
        self._updated = False

    def _assign(self, states: States, masters: Mapping[SyncedParameter, torch.Tensor]) -> None:
        entries = self.entries
        counts = {entry: self._update_count(states.get(entry.param, {})) for entry in entries}
        for entry in entries:
            value = masters[entry] if entry in masters else _host_array(entry.param, entry)
            self._client.assign(entry.layer, borrowed(value), 0, counts[entry])
        self._wait(entries)
        for number, name in enumerate(self.algorithm.state_names, start=1):
            having = [entry for entry in entries if states.get(entry.param, {}).get(name) is not None]
            for entry in having:
                array = _host_array(states[entry.param][name], entry)
                self._client.assign(entry.layer, borrowed(array), number, counts[entry])
            self._wait(having)

    def _kept_masters(self) -> dict[SyncedParameter, torch.Tensor]:
        """The servers' float32 values of parameters that are here as steps have brought them, rounded."""
        hosts = self._pulled([entry for entry in self.entries if entry.asked.parameter_wire == "bf16"], 0)
        own = {entry: entry.param.detach().cpu() for entry in hosts}
        kept = {entry: flat_view(host) for entry, host in hosts.items() if torch.equal(_rounded(host), own[entry])}
        others = [param for entry, param in own.items() if entry not in kept]
        if others and all(torch.equal(_rounded(param), param) for param in others):
            warnings.warn(
                "the parameters that servers take over have the digits of bfloat16, so what was rounded off before "
                "they were saved is lost: with parameter_wire=bf16 call pull_parameters() before you save the model",
                stacklevel=6,
            )
        return kept

    def _update_count(self, state: Mapping[str, Any]) -> int:
        if self.algorithm.counts_steps:
            return int(state.get("step", 0))
        # SGD's first momentum is the gradient itself; to later ones it is added.
        return int(state.get("momentum_buffer") is not None)

    def _pull_parameters(self, rounded: bool = True) -> None:
        """`rounded`: to what steps bring, so that training goes on with the bits of a job that was not interrupted."""
        places = {  # where each can be received: its own memory if that is possible
            entry: entry.param.detach() if _in_host_order(entry.param, entry) else entry.new_buffer("cpu")
            for entry in self.entries
        }
        self._pull(places, 0)
        with torch.no_grad():
            for entry, host in places.items():
                if rounded and entry.asked.parameter_wire == "bf16":
                    host.copy_(_rounded(host))
                if host.data_ptr() != entry.param.data_ptr():
                    entry.param.copy_(host)
        increment_version([entry.param for entry in places])

    def _pulled(self, entries: Iterable[SyncedParameter], array: int) -> dict[SyncedParameter, torch.Tensor]:
        """This array of the servers', by parameter, in host memory."""
        places = {entry: entry.new_buffer("cpu") for entry in entries}
        self._pull(places, array)
        return places

    def _pull(self, places: Mapping[SyncedParameter, torch.Tensor], array: int) -> None:
        if self._flights is not None:
            self._flights.wait_for(places)
        for entry, host in places.items():
            self._client.pull(entry.layer, borrowed(flat_view(host)), array, exact=True)
        self._wait(places)

    def _wait(self, entries: Iterable[SyncedParameter]) -> None:
        for entry in entries:
            self._client.wait(entry.layer)

    def state_bytes(self) -> tuple[int, int]:
        """Of the optimizer's state: bytes on the shard of this process, and on all servers together."""
        here = everywhere = 0
        for group, param_group in zip(self._groups, self._optimizer.param_groups, strict=True):
            count = self._rule(param_group).state_count
            here += count * sum(_kept_bytes(entry, entry.shard_bytes) for entry in group)
            everywhere += count * sum(_kept_bytes(entry, entry.param.nbytes) for entry in group)
        return here, everywhere


def _kept_bytes(entry: SyncedParameter, size_bytes: int) -> int:
    """Of an array that a server keeps for so many bytes of the parameter."""
    return 2 * size_bytes if entry.has_masters else size_bytes


def _stored(entry: SyncedParameter) -> StoredParameter:
    assert entry.stored is not None
    return entry.stored


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """What arrives of float32 values with parameter_wire=bf16."""
    return tensor.bfloat16().float()


def _lacks_momentum(entry: SyncedParameter) -> bool:
    return _stored(entry).update_count > 0 and _stored(entry).state_count == 0


def _in_host_order(tensor: torch.Tensor, entry: SyncedParameter) -> bool:
    return tensor.device.type == "cpu" and exchangeable(tensor, entry.layout)


def _host_array(tensor: torch.Tensor, entry: SyncedParameter) -> torch.Tensor:
    """The elements in host memory, in the order that all ranks agreed on."""
    tensor = tensor.detach()
    if _in_host_order(tensor, entry):
        return flat_view(tensor)
    return flat_view(entry.new_buffer("cpu").copy_(tensor))
