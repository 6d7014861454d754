"""One array of a model as a layer of the client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

from poseidon import _core
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.schemes import takes_factors, takes_rows

_KEPT_SUMS = 4  # enough to go back by two attempts
SchemeChoice = str | Mapping[str, str]
"""A scheme for all layers, or schemes by patterns of names."""

WireChoice = str | Mapping[str, str]
"""A wire format for all layers, or wire formats by patterns of names."""


LossyChoice = str | Mapping[str, str]
"""What `auto` may choose beside the exact schemes: for all layers, or by patterns of names."""


_LAYERS: weakref.WeakSet[SyncedLayer] = weakref.WeakSet()


def _let_go() -> None:
    """At the end of the process. Autograd's graph may hold layers where the garbage collector does not see them."""
    for layer in list(_LAYERS):
        for name in ("asked", "terms", "rules"):  # the core's objects, which would count as leaked
            vars(layer).pop(name, None)


Finalize(None, _let_go, exitpriority=1)  # after the job's end, which has a higher one


def _nobody() -> None:
    return None


class SyncedLayer:
    """One array whose gradient is exchanged, its layer in the client, and the scheme of its exchanges.

    A framework derives the class of its parameters from it. All code may read the attributes. Only the methods here
    write them, except `position` and `urgency`, which `Priorities` writes. Use it from the thread that trains.
    """

    def __init__(
        self, facts: LayerFacts, wishes: LayerWishes, rules: LayerRules, shape: tuple[int, ...], fully_connected: bool
    ) -> None:
        """Raises InvalidArgument, naming the layer, if it cannot do what is wished."""
        self.name, self.dtype, self.shape = facts.name, facts.dtype, shape
        self.facts, self.wishes, self.rules = facts, wishes, rules
        self.fully_connected = fully_connected  # only fully connected layers have it
        self._ask()
        self.settled_count: float | None = None  # the mean K by which "auto" was settled for good
        self.next_scheme = ""  # the one that the next exchange takes, the same on every rank
        self.kept_count = 0  # the float32s that wait for later steps in a client; 0: none ever do
        self.layer = -1  # number in the client
        self.unit = (-1, -1)  # equal for layers that travel together
        self.shard_bytes = 0  # of a parameter on servers, on the shard of this process
        self._updater: Callable[[], object | None] = _nobody
        self.forward_rows = 0  # K as forward saw it, until the ranks first agreed on schemes
        self.position = 0  # in the order in which forward uses the parameters
        self.urgency: float | None = None  # of its exchange, once the ranks have agreed on the order
        self.was_absent = False  # no rank had a gradient in the last exchange
        self._absences = 0  # exchanges in which none had
        self._returns = 0  # exchanges with a gradient after one of these
        self._factor_sums: dict[int, int] = {}  # K summed over the workers, by the attempts of the last exchanges
        _LAYERS.add(self)

    def _ask(self) -> None:
        """Asks what it may do."""
        self.asked = self.rules.layer(self.facts, self.wishes)  # as it asks the plan for a place
        self._take(self.rules.terms(self.asked))

    def _take(self, terms: _core.LayerTerms) -> None:
        """Takes its terms: those that its plan has, once it is in a client. Steps read the copies."""
        self.terms, self.scheme = terms, terms.scheme
        self.on_servers = self.facts.stored  # they hold and update the parameter
        self.element_count = self.asked.element_count  # of what is exchanged
        self.factorable, self.row_gradient = self.asked.factorable, self.asked.row_gradient
        rows_decide = self.row_gradient and self.asked.scheme == "auto" and any(map(takes_rows, terms.schemes))
        # Whether exchanges tell how many factors or rows their gradients have.
        self.counted = terms.uses_factors or rows_decide

    @property
    def updater(self) -> object | None:
        """What updates the parameter when its gradient arrives, after backward."""
        return self._updater()

    @property
    def has_masters(self) -> bool:
        """Whether servers that hold the parameter keep it in more bits than it has here."""
        return self.dtype == "bfloat16"

    @property
    def sends_rows(self) -> bool:
        """Whether the next exchange takes the gradient as rows."""
        return self.row_gradient and takes_rows(self.next_scheme if self.counted else self.scheme)

    def wire_of(self, scheme: str) -> str:
        """The format in which this scheme sends the numbers. "fp32": as they are, whatever they are."""
        by_parts = takes_factors(scheme) or takes_rows(scheme)
        return self.terms.factor_wire(self.asked) if by_parts else self.terms.wire(self.asked)

    def check(self, **wishes: Any) -> None:
        """Raises InvalidArgument, naming the layer, if it could not do what it is told by these other wishes."""
        self.rules.layer(self.facts, replace(self.wishes, **wishes))

    def wish(self, **wishes: Any) -> None:
        """Changes these wishes. They hold when the layer is next added to a client."""
        self.wishes = replace(self.wishes, **wishes)
        self._ask()

    def settle(self, counts: Sequence[int], cluster: _core.Cluster) -> None:
        """Sets what "auto" is from now on, by the ranks' numbers of factors, which are 0 or less where one has none."""
        if self.asked.scheme != "auto":
            return
        if min(counts) > 0:
            self.settled_count = sum(counts) / len(counts)
        else:
            self.give_no_factors()
        self.wish(settled=self.rules.settled_scheme(self.asked, counts, cluster))

    def give_no_factors(self) -> None:
        """Sends whole gradients from now on. It holds when the layer is next added to a client."""
        self.facts = replace(self.facts, gives_factors=False)
        self._ask()

    def compress_by(self, scheme: str, rank: int) -> None:
        """Asks for a lossy scheme, of this rank. It holds when the layer is next added to a client."""
        self.wish(scheme=scheme, powersgd_rank=rank, wire=self.asked.wire, wire_is_given=True)
        self.next_scheme = scheme

    def place(self, layer: int, unit: tuple[int, int], terms: _core.LayerTerms, shard_bytes: int) -> None:
        """Notes the layer's number and unit in a client to which it has been added, and its terms there."""
        self._take(terms)
        self.layer, self.unit, self.shard_bytes = layer, unit, shard_bytes
        self.kept_count = terms.kept_count
        self.was_absent, self._absences, self._returns = False, 0, 0

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
        self.facts = replace(self.facts, stored=True)
        self.wish(parameter_wire=parameter_wire, float32_value=self.has_masters)
        self.next_scheme = self.scheme

    def leave_servers(self) -> None:
        """Makes the gradient travel as before `hold_on_servers`, once the layer is next added to a client."""
        self.facts = replace(self.facts, stored=False)
        self.forget_client()

    def update_by(self, updater: object | None) -> None:
        """Makes `updater` update the parameter when its gradient arrives, from now on. None: nobody does."""
        self._updater = _nobody if updater is None else weakref.ref(updater)  # which has this layer

    def forget_client(self) -> None:
        """Forgets the client, before the layer is added to another one."""
        self._ask()
        self.next_scheme = self.scheme if self.on_servers else ""
        self.kept_count = self.forward_rows = 0

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
