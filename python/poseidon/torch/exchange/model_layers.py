"""The layers of one model in its client: what changes them, and what the ranks agree on before each exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from poseidon import _core
from poseidon.adapter.choice.choices import Choices
from poseidon.adapter.control import Control
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_table import LayerTable, Residual
from poseidon.adapter.priorities import Priorities
from poseidon.errors import PoseidonError
from poseidon.options import Settings
from poseidon.torch.exchange.comm_hooks import PowerSGDHook
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.exchange.small_groups import SmallGroups
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.model.compiled import is_in_use
from poseidon.torch.model.parameters import BackwardListener, SyncedParameter, attach_all


class ModelLayers:
    """The layers of `entries`, in the order in which backward finishes them. Used from the thread that trains.

    A change of theirs waits until nothing is in flight. Before `connect` it is only noted.
    """

    _client: _core.Client
    _control: Control

    def __init__(
        self, entries: Sequence[SyncedParameter], settings: Settings, features: Features, flights: Flights
    ) -> None:
        self.connected = False
        self.attempt = -1  # of `Recovery`, the one that runs; -1: there is no Recovery
        self.groups = SmallGroups()
        self.choices = Choices(settings, entries)
        self.priorities: Priorities | None = None  # of a model with updates on the workers
        self.powersgd: PowerSGDHook | None = None  # what has chosen the layers of that scheme
        self._entries, self._settings, self._flights = entries, settings, flights
        self._grouped = entries if features.keeps(SAME_STEP) else []
        self._table = LayerTable(entries)
        self._may_be_compiled = False
        self._loaded_residuals: Mapping[SyncedLayer, Residual] = {}  # before `connect`

    def connect(self, client: _core.Client, control: Control, transfer: Transfer, listener: BackwardListener) -> None:
        """Collective: adds the layers to `client`. `listener` hears of the backward passes that reach parameters."""
        self._client, self._control = client, control
        self._table.connect(client, control)
        self.choices.connect(client, control, multiplies=self._entries[0].param.device.type == "cpu")
        if not self.connected:
            attach_all(self._entries, listener)
        self.connected = True
        self.groups.connect(client, transfer, self._grouped)
        self._listen()
        self._table.set_residuals(self._loaded_residuals)
        self._loaded_residuals = {}
        if self.priorities is not None:
            self.priorities.connect(client, control)

    def attach(self, listener: BackwardListener) -> None:
        """The parameters are this model's again, after another wrapper has had them."""
        attach_all(self._entries, listener)
        self._listen()

    def _listen(self) -> None:
        """Captures factors where layers take them, and hears before gradients are accumulated.

        Not of those of groups, whose exchange has a copy of them.
        """
        for entry in self._entries:
            entry.capture(entry.terms.uses_factors)
            if not self.groups.has(entry):
                entry.hear_before()

    def note_compiled_code(self) -> None:
        """A forward pass begins, in which compiled code may run."""
        if not self._may_be_compiled and is_in_use():
            self._may_be_compiled = True
            for entry in self._entries:
                entry.capture_compiled()

    # Before an exchange.

    def begin_attempt(self, number: int) -> None:
        """An attempt at this step begins; the rows that forward has counted before do not count."""
        self.attempt = number
        self._table.begin_attempt()

    def resume(self, attempt: int, decision: int) -> None:
        """After `connect`: the next exchanges take the schemes that they would have taken without a failure.

        `decision`: of the search for a priority threshold, which another rank may have found; -1: none.
        """
        self._table.resume(attempt)
        self.choices.resume(attempt)
        if self.priorities is not None:
            self.priorities.decide(decision)

    def agree(self) -> None:
        """An exchange of all layers begins: each has its scheme and its priority."""
        if self.powersgd is not None:
            self.powersgd.begin_run(self._client, self.attempt)
        self.choices.begin_run(self.attempt)
        self._table.agree()
        if self.priorities is not None:
            self.priorities.begin_run()

    # What lossy schemes have not sent yet.

    def residuals(self, after_failure: bool = False) -> dict[SyncedLayer, Residual]:
        """Copies of it, by layer. Waits for exchanges of these layers in flight.

        `after_failure`: the client has failed, so that all exchanges end without a result.
        """
        if not self.connected:
            return {}
        if after_failure:
            with suppress(PoseidonError):
                self._client.wait_all()
        else:
            self._flights.settle([entry for entry in self._entries if entry.kept_count])
        return self._table.residuals()

    def load_residuals(self, residuals: Mapping[SyncedLayer, Residual]) -> None:
        """Makes these the residuals of lossy layers. The other ones have none."""
        if not self.connected:
            self._loaded_residuals = residuals
            return
        self._flights.settle([entry for entry in self._entries if entry.kept_count])
        self._table.set_residuals(residuals)

    # Changes. Each is collective.

    def store(self, entries: Collection[SyncedParameter]) -> None:
        """The servers are to hold these parameters. An update of the `Synchronizer` gives them values."""
        self._flights.settle()
        # The others get new layers, too: of a group of small ones nothing is sent until all have contributed.
        renewed = [entry for entry in self._entries if not entry.on_servers]
        for entry in entries:
            entry.hold_on_servers(self._settings.parameter_wire)
        self._renew(renewed)

    def send_as(self, wire: str) -> None:
        """The gradients of all float32 parameters, none of them on servers, travel in this wire format."""
        self._flights.settle()
        for entry in self._entries:
            if entry.dtype == "float32":
                entry.wish(wire=wire, wire_is_given=True)
        self._renew(self._entries)

    def compress_by(self, hook: PowerSGDHook) -> None:
        """The matrices that torch's hook compresses take powersgd, from the step on that its state says."""
        self._flights.settle()
        self.powersgd = hook
        hook.choose_layers(self._entries)
        self._renew(self._entries)

    def prioritize(self) -> None:
        """From now on backward does not wait for parameters with an `updater`, and urgent ones go first.

        It is not collective.
        """
        if self.priorities is None:
            self.priorities = self._flights.priorities = Priorities(self._settings, self._entries)
            if self.connected:
                self.priorities.connect(self._client, self._control)

    def _renew(self, entries: Sequence[SyncedParameter]) -> None:
        """Adds these layers again, because they have changed."""
        if self.connected:
            self._table.renew(entries)
            self.groups.renew()
            self._listen()
            self.choices.renew()
        if self.priorities is not None:
            self.priorities.renew()
