"""One array of a model as a layer of the client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from poseidon import _core
from poseidon.schemes import is_lossy, takes_factors, takes_rows

_KEPT_SUMS = 4  # enough to go back by two attempts
_WIRE_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8_blocks": "int8"}

SchemeChoice = str | Mapping[str, str]
"""A scheme for all layers, or schemes by patterns of names."""

WireChoice = str | Mapping[str, str]
"""A wire format for all layers, or wire formats by patterns of names."""


LossyChoice = str | Mapping[str, str]
"""What `auto` may choose beside the exact schemes: for all layers, or by patterns of names."""


@dataclass(frozen=True)
class Compression:
    """How lossy schemes and wire formats compress a layer, if it takes one."""

    allowed: str = ""
    """The lossy scheme that `auto` may choose beside the exact ones; empty: none."""

    topk_fraction: float = 0.01
    """topk: the part of the elements that a worker sends."""

    powersgd_rank: int = 4
    """powersgd: the rank of what a worker sends."""

    rows: int = 0
    """powersgd: the rows of the layer as a matrix; 0: it is none."""

    factor_wire: str = ""
    """The format in which factors travel; empty: as dense gradients do, but never with fewer than 16 bits."""

    error_feedback: bool = False
    """What the wire format rounds off a dense gradient is added to the next one."""


def _nobody() -> None:
    return None


class SyncedLayer:
    """One array whose gradient is exchanged, its layer in the client, and the scheme of its exchanges.

    A framework derives the class of its parameters from it. All code may read the attributes. Only the methods here
    write them, except `position` and `urgency`, which `Priorities` writes. Use it from the thread that trains.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        element_count: int,
        scheme: str,
        wire: str,
        *,
        factorable: bool,
        fully_connected: bool,
        row_gradient: bool = False,
        zeros_are_missing: bool = False,
        compression: Compression | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype  # the core's name for that of the elements that are exchanged
        self.element_count = element_count  # of what is exchanged
        self.factorable = factorable  # the gradient may travel as factors
        self.row_gradient = row_gradient  # the gradient may travel as the few rows that it has
        self.zeros_are_missing = zeros_are_missing  # it may also travel whole, because other rows are zeros
        self.fully_connected = fully_connected  # only fully connected layers have it
        self.asked_scheme = scheme
        self.scheme = scheme  # as asked for, or ps where the plan settled on it
        self.settled_count: float | None = None  # the mean K by which "auto" was settled for good
        self.compression = compression or Compression()
        self.wire = wire  # the format in which the numbers of a float32 gradient travel
        self.next_scheme = ""  # the one that the next exchange takes, the same on every rank
        self.grouped = False  # so small that it travels with others
        self.kept_count = 0  # the float32s that wait for later steps; 0: none ever do
        self.layer = -1  # number in the client
        self.unit = (-1, -1)  # equal for layers that travel together
        self.bytes_per_value = 0.0  # on the way, of a dense gradient and of factors
        self.bytes_per_factor = 0.0
        self._value_dtype = self._factor_dtype = dtype  # the same, as the core names them
        self.on_servers = False  # servers hold and update the parameter
        self.parameter_wire = "fp32"  # the format in which such a parameter comes back
        self.shard_bytes = 0  # of such a parameter, on the shard of this process
        self._updater: Callable[[], object | None] = _nobody
        self.forward_rows = 0  # K as forward saw it, until the ranks first agreed on schemes
        self.position = 0  # in the order in which forward uses the parameters
        self.urgency: float | None = None  # of its exchange, once the ranks have agreed on the order
        self.was_absent = False  # no rank had a gradient in the last exchange
        self._absences = 0  # exchanges in which none had
        self._returns = 0  # exchanges with a gradient after one of these
        self._forms = (factorable, row_gradient, zeros_are_missing)  # of its gradient where servers do not hold it
        self._factor_sums: dict[int, int] = {}  # K summed over the workers, by the attempts of the last exchanges

    def core_layer(self) -> _core.Layer:
        """This array as the core sees it."""
        rows, cols = self.shape if self.factorable or self.row_gradient else (0, 0)
        return _core.Layer(
            self.name,
            self.dtype,
            self.element_count,
            rows,
            cols,
            self.scheme,
            self.on_servers,
            wire=self.wire,
            parameter_wire=self.parameter_wire,
            float32_value=self.on_servers and self.has_masters,
            row_gradient=self.row_gradient,
            zeros_are_missing=self.zeros_are_missing,
            lossy=self.compression.allowed,
            topk_fraction=self.compression.topk_fraction,
            powersgd_rank=self.compression.powersgd_rank,
            matrix_rows=self.compression.rows,
            factor_wire=self.compression.factor_wire,
            error_feedback=self.compression.error_feedback,
        )

    @property
    def updater(self) -> object | None:
        """What updates the parameter when its gradient arrives, after backward."""
        return self._updater()

    @property
    def has_masters(self) -> bool:
        """Whether servers that hold the parameter keep it in more bits than it has here."""
        return self.dtype == "bfloat16"

    @property
    def keeps_rounding(self) -> bool:
        """Whether what the wire format rounds off waits for the next step, unless it is too small for that."""
        return self.keeps_rounding_of(self.wire)

    def keeps_rounding_of(self, wire: str) -> bool:
        """The same, if the gradient travelled in this wire format."""
        return self.compression.error_feedback and wire != "fp32" and self.dtype == "float32"

    @property
    def may_be_lossy(self) -> bool:
        """Whether a part of its gradients may wait for later steps, unless it is too small for that."""
        return self.keeps_rounding or (
            not self.on_servers and (is_lossy(self.scheme) or bool(self.compression.allowed))
        )

    @property
    def uses_factors(self) -> bool:
        """Whether the layer may take a scheme that sends factors."""
        return self.factorable and (self.scheme == "auto" or takes_factors(self.scheme))

    @property
    def counted(self) -> bool:
        """Whether the scheme of its exchanges depends on how many factors or rows its gradients have."""
        return not self.grouped and (self.uses_factors or (self.row_gradient and self.scheme == "auto"))

    @property
    def sends_rows(self) -> bool:
        """Whether the next exchange takes the gradient as rows."""
        return self.row_gradient and takes_rows(self.next_scheme if self.counted else self.scheme)

    def wire_of(self, scheme: str) -> str:
        """The format in which this scheme sends the numbers. "fp32": as they are, whatever they are."""
        sent_as = self._factor_dtype if takes_factors(scheme) or takes_rows(scheme) else self._value_dtype
        return "fp32" if sent_as == self.dtype else _WIRE_OF_DTYPE[sent_as]

    def ask_for(self, scheme: str) -> None:
        """Sets the only scheme that the job can use, whatever the user has asked for."""
        self.asked_scheme = self.scheme = scheme

    def settle(self, scheme: str, factor_count: float) -> None:
        """Sets what "auto" is from now on, chosen by this mean number of factors of a worker."""
        self.ask_for(scheme)
        self.settled_count = factor_count

    def compress_by(self, scheme: str, compression: Compression) -> None:
        """Asks for a lossy scheme. It holds when the layer is next added to a client."""
        self.asked_scheme = self.scheme = self.next_scheme = scheme
        self.grouped, self.compression = False, compression
        self.row_gradient = self.zeros_are_missing = False

    def send_as(self, wire: str) -> None:
        """Sets the wire format of the gradient. It holds when the layer is next added to a client."""
        self.wire = wire

    def place(
        self, layer: int, unit: tuple[int, int], facts: _core.Unit, planned: _core.Layer, shard_bytes: int
    ) -> None:
        """Notes the layer's number and unit in a client to which it has been added, as the plan has it."""
        is_open = self.scheme == "auto" and (self.factorable or self.zeros_are_missing)
        open_to_ps = is_open or is_lossy(self.scheme)
        grouped = open_to_ps and planned.scheme == "ps"
        self.kept_count = planned.kept_count
        self.layer, self.unit, self.shard_bytes = layer, unit, shard_bytes
        self.bytes_per_value, self.bytes_per_factor = facts.bytes_per_value, facts.bytes_per_factor
        self._value_dtype, self._factor_dtype = facts.wire_dtype, facts.factor_dtype
        self.was_absent, self._absences, self._returns = False, 0, 0
        if grouped:
            self.scheme, self.grouped = "ps", True

    def note_absence(self, present: bool) -> None:
        """An exchange is over in which no rank had a gradient, or, `present`, the first one after such exchanges."""
        self._returns += present
        self._absences += not present
        self.was_absent = not present

    def presence(self, exchanges: int) -> float:
        """The part of these exchanges, all so far, in which some rank had a gradient. 1 before the first."""
        return 1 - self._absences / exchanges if exchanges else 1.0

    def mostly_returns(self, exchanges: int) -> bool:
        """Whether gradients come mostly after an exchange without one. Then nothing is known of their factors."""
        return 2 * self._returns > exchanges - self._absences

    def take_next_scheme(self, client: _core.Client) -> None:
        """Asks the client for the scheme of the next exchange."""
        self.next_scheme = client.next_scheme(self.layer)

    def hold_on_servers(self, parameter_wire: str) -> None:
        """Makes servers update the parameter from now on, from dense gradients.

        If it is float32 it comes back in the format `parameter_wire`.
        """
        self.parameter_wire = parameter_wire if self.dtype == "float32" else "fp32"
        self._forms = (self.factorable, self.row_gradient, self.zeros_are_missing)
        self.on_servers, self.factorable = True, False
        self.row_gradient = self.zeros_are_missing = False
        self.scheme, self.next_scheme, self.grouped = "ps", "ps", False

    def leave_servers(self) -> None:
        """Makes the gradient travel as before `hold_on_servers`, once the layer is next added to a client."""
        self.on_servers, self.parameter_wire = False, "fp32"
        self.factorable, self.row_gradient, self.zeros_are_missing = self._forms
        self.forget_client()

    def update_by(self, updater: object | None) -> None:
        """Makes `updater` update the parameter when its gradient arrives, from now on. None: nobody does."""
        self._updater = _nobody if updater is None else weakref.ref(updater)  # which has this layer

    def forget_client(self) -> None:
        """Forgets the client, before the layer is added to another one."""
        stored_scheme = "ps" if self.on_servers else ""
        self.scheme, self.grouped, self.next_scheme = stored_scheme or self.asked_scheme, False, stored_scheme
        self.kept_count = 0
        self.forward_rows = 0

    def count_forward_rows(self, row_count: int) -> None:
        """Adds the rows (K) of one forward call, for the first choice of schemes."""
        self.forward_rows += row_count

    def forget_forward_rows(self) -> None:
        """Forgets the rows that forward has counted so far."""
        self.forward_rows = 0

    # K as exchanges found it, from which the next one's scheme follows.

    def note_factor_sum(self, attempt: int, factor_sum: int) -> None:
        """Notes K summed over the workers, as this attempt's exchange found it."""
        self._factor_sums[attempt] = factor_sum
        if len(self._factor_sums) > _KEPT_SUMS:
            del self._factor_sums[min(self._factor_sums)]

    def factor_sum_before(self, attempt: int) -> int | None:
        """K as the last exchange before this attempt found it, or None if there was none."""
        earlier = [number for number in self._factor_sums if number < attempt]
        return self._factor_sums[max(earlier)] if earlier else None

    def go_back_to(self, attempt: int) -> None:
        """Forgets the factor counts of the exchanges of this attempt and later ones."""
        self._factor_sums = {number: count for number, count in self._factor_sums.items() if number < attempt}

    def take_factor_sum(self, attempt: int, factor_sum: int | None) -> None:
        """Takes the value that `factor_sum_before` this attempt returned on another rank."""
        self._factor_sums = {} if factor_sum is None else {attempt - 1: factor_sum}
