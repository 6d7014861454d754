"""The exchange of `LocalSGD`: all workers' parameters become their mean, or what the outer optimizer makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.features import Features
from poseidon.adapter.layer_rules import LayerWishes
from poseidon.adapter.layer_table import LayerTable
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.exchange.weight import Weight
from poseidon.torch.model.collect import facts_of
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.rules import UPDATED_DTYPES, algorithm_of, refuse_overlaps
from poseidon.torch.optimizer.server_update import ServerUpdate
from poseidon.torch.optimizer.succession import Tenure
from poseidon.torch.tensors.compatibility import increment_version
from poseidon.torch.tensors.memory import borrowed, exchangeable, flat_view


@dataclass(frozen=True)
class OuterNesterov:
    """SGD with Nesterov momentum on the servers, for `LocalSGD(outer=...)` (DiLoCo, Douillard et al. 2023, §2).

    Its gradient is the *pseudo-gradient*: the global parameters of the last averaging minus the worker's parameters,
    averaged over the workers. The defaults are those of the paper. `momentum=0` is plain SGD: with `lr=1` its result is
    the mean of the workers' parameters, up to rounding. Raises InvalidArgument for values outside their ranges.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise InvalidArgument(f"the outer lr is {self.lr}: it must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"the outer momentum is {self.momentum}: it must be from 0 to less than 1")

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.SGD:
        """The optimizer of torch with the same arithmetic."""
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


PLAIN_MEAN = OuterNesterov(lr=1.0, momentum=0.0)
"""The mean of the workers' parameters, made of pseudo-gradients, which lose less than parameters when rounded."""


class Averaging:
    """Makes the parameters of `found` equal on all ranks. Use it from the thread that trains.

    `connect` comes first where there are servers. Without it there is one worker.
    """

    def __init__(self, found: Sequence[SyncedParameter], params: Sequence[torch.nn.Parameter]) -> None:
        refuse_overlaps(found, "give each its own memory")
        self._found = found
        self.trained = [entry.param for entry in found]
        self.entries = [
            SyncedParameter(param, facts_of(entry.name, param), LayerWishes("ps", entry.asked.wire), entry.rules)
            for entry, param in zip(found, params, strict=True)
        ]
        self._client: _core.Client | None = None
        self._control: Control | None = None

    def connect(self, client: _core.Client, control: Control) -> None:
        """Collective: the exchange goes through this client from now on."""
        for entry in self.entries:
            entry.forget_client()
        LayerTable(self.entries).connect(client, control)
        self._client, self._control = client, control

    def start(self, overlaps: bool) -> None:
        """Collective: sends the parameters. `overlaps`: they are trained on before `finish`.

        Raises InvalidArgument if the ranks' weights have no mean.
        """

    def settle(self) -> None:
        """Waits for what `start` has asked for, which the other ranks have started, too."""

    def finish(self, mix: float) -> None:
        """Makes each parameter `mix` times itself plus 1 − `mix` times what `start` has asked for."""

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Collective: takes what `state` has returned. Rank 0's counts."""

    # What is kept, where it is more than the parameters.

    def result(self) -> list[torch.Tensor] | None:
        """What `finish` takes and `state` does not have. It has arrived."""
        return None

    def restore(self, result: list[torch.Tensor] | None) -> None:
        """Makes `finish` take what `result` has returned."""

    def take_over(self) -> None:
        """Collective: rank 0's parameters are those of all ranks now; nothing has been trained since."""

    def state(self, whole: bool = True) -> dict[str, Any] | None:
        """What is kept between averagings beside the parameters, as plain data and tensors. Not collective.

        Not `whole`: without what servers hold.
        """
        return None


class MeanOfParameters(Averaging):
    """The mean of the ranks' parameters: their sum in rank order, divided once. Every rank gets the same bits."""

    def __init__(self, found: Sequence[SyncedParameter], weight: Weight) -> None:
        super().__init__(found, [entry.param for entry in found])
        self._weight = weight
        self._buffers: list[torch.Tensor] = []

    def start(self, overlaps: bool) -> None:
        refuse_overlaps(self._found, "give each its own memory")  # they may have been tied since
        scale = self._weight.scale()
        self._buffers = [_exchanged(entry, copies=overlaps) for entry in self.entries]
        if scale != 1:
            # Where the parameters are exchanged from their own memory, the mean is written there, too.
            for buffer in self._buffers:
                buffer.mul_(scale)
        if self._client is not None:
            for entry, buffer in zip(self.entries, self._buffers, strict=True):
                self._client.start(entry.layer, borrowed(flat_view(buffer)), self._client.world_size)

    def settle(self) -> None:
        if self._client is not None:
            for entry in self.entries:
                self._client.wait(entry.layer)

    def finish(self, mix: float) -> None:
        self.settle()
        for entry, buffer in zip(self.entries, self._buffers, strict=True):
            _take(entry, buffer, mix)
        self._buffers = []

    def result(self) -> list[torch.Tensor] | None:
        return [buffer.clone() for buffer in self._buffers]

    def restore(self, result: list[torch.Tensor] | None) -> None:
        assert result is not None
        self._buffers = [buffer.clone() for buffer in result]

    def load(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            raise Mismatch(
                "the checkpoint has the state of an outer optimizer, and LocalSGD has none: pass the same outer and "
                "wire as when it was saved"
            )


class OuterUpdate(Averaging):
    """The servers hold the global parameters and update them by the mean pseudo-gradient.

    Each worker keeps the global parameters as it last received them, in the host's memory. They become the
    pseudo-gradient there, and the new global parameters are received in the same place.
    """

    def __init__(
        self, found: Sequence[SyncedParameter], weight: Weight, outer: OuterNesterov, parameter_wire: str
    ) -> None:
        for entry in found:
            if entry.param.dtype not in UPDATED_DTYPES:
                raise InvalidArgument(
                    f"parameter {entry.name} has dtype {entry.param.dtype}; an outer optimizer and wire formats take "
                    "float32, float64 and bfloat16 parameters: leave outer and wire out, or use float32 parameters"
                )
        held = [torch.nn.Parameter(entry.param.detach().to("cpu", copy=True)) for entry in found]
        super().__init__(found, held)
        self._held = held
        self._weight = weight
        self._is_under_way = False
        self._outer = outer.optimizer(held)
        algorithm = algorithm_of(self._outer)
        self._update = ServerUpdate(
            algorithm, [self.entries], self._outer, shows_means=False, tenure=Tenure(self, Features())
        )
        self._parameter_wire = parameter_wire

    def connect(self, client: _core.Client, control: Control) -> None:
        self._is_under_way = False
        for entry in self.entries:
            entry.hold_on_servers(self._parameter_wire)
        super().connect(client, control)
        self._update.connect(client, control)

    def take_over(self) -> None:
        with torch.no_grad():
            for held, param in zip(self._held, self.trained, strict=True):
                held.copy_(param)
        self._outer.state.clear()
        self._publish({})

    def _publish(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        if self._client is None:
            self._outer.state.update({held: dict(state) for held, state in states.items()})
        else:
            self._update.load_states(states)

    def start(self, overlaps: bool) -> None:
        client = self._client
        if client is None:
            for held, param in zip(self._held, self.trained, strict=True):
                held.grad = held - param.to(held.device)
            self._outer.step()
            self._outer.zero_grad()
            return
        scale = self._weight.scale()
        self._update.begin()
        self._is_under_way = True
        for entry, held, param in zip(self.entries, self._held, self.trained, strict=True):
            held.sub_(param.to(held.device))
            if scale != 1:
                held.mul_(scale)
            memory = flat_view(held)
            client.push_pull(entry.layer, borrowed(memory), borrowed(memory), client.world_size)

    def settle(self) -> None:
        if self._client is None or not self._is_under_way:
            return
        for entry in self.entries:
            self._client.wait(entry.layer)
            assert entry.stored is not None
            entry.stored.received()
        self._update.finished(set(self.entries))
        self._update.step()
        self._is_under_way = False

    def finish(self, mix: float) -> None:
        self.settle()
        for held, param in zip(self._held, self.trained, strict=True):
            _mix(param, held, mix)

    def state(self, whole: bool = True) -> dict[str, Any] | None:
        states: Mapping[torch.Tensor, Mapping[str, Any]] = self._outer.state if self._client is None else {}
        if self._update.connected and whole:
            states = self._update.pull_states()
        return {
            "parameters": [held.detach().clone() for held in self._held],
            "momentum": [states.get(held, {}).get("momentum_buffer") for held in self._held],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise Mismatch(
                "the checkpoint has no state of an outer optimizer, and LocalSGD has one: call push_parameters() on "
                "every rank after loading the model, or pass the same outer and wire as when it was saved"
            )
        shapes = [tuple(value.shape) for value in state["parameters"]]
        if shapes != [tuple(held.shape) for held in self._held]:
            raise Mismatch("the checkpoint has an outer optimizer's state of other parameters: load that of this model")
        momenta: dict[torch.Tensor, dict[str, Any]] = {
            held: {"momentum_buffer": value.clone()}
            for held, value in zip(self._held, state["momentum"], strict=True)
            if value is not None
        }
        with torch.no_grad():
            for held, value in zip(self._held, state["parameters"], strict=True):
                held.copy_(value)
        self._outer.state.clear()
        self._publish(momenta)


def _exchanged(entry: SyncedParameter, copies: bool) -> torch.Tensor:
    """The parameter's own memory, if it can be exchanged, or a copy in the host's memory; `copies`: always that."""
    param = entry.param.detach()
    view = entry.form.view(param)
    if not copies and view is not None and view.device.type == "cpu" and exchangeable(view, entry.layout):
        return view
    buffer = entry.new_buffer("cpu")
    entry.form.write(param.cpu(), buffer)
    return buffer


def _take(entry: SyncedParameter, buffer: torch.Tensor, mix: float) -> None:
    """The parameter becomes what has been received into the memory that `_exchanged` returned."""
    param = entry.param.detach()
    if buffer.data_ptr() == param.data_ptr():
        increment_version([entry.param])
    else:
        _mix(entry.param, entry.form.read(buffer, None), mix)


def _mix(param: torch.Tensor, value: torch.Tensor, mix: float) -> None:
    value = value.to(param.device)
    if mix == 0:
        param.copy_(value)
    else:
        param.mul_(mix).add_(value, alpha=1 - mix)
