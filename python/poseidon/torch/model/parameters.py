"""The parameters of a module that are synchronized, and the state of each one's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poseidon.errors import InvalidArgument
from poseidon.torch.model.factors import FactorForward, Factors
from poseidon.torch.model.gradient_form import DenseForm, form_of
from poseidon.torch.model.passes import Mode
from poseidon.torch.tensors.compatibility import compiler, leave_uncompiled
from poseidon.torch.tensors.memory import DTYPE_NAMES
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.watched import raw_grad

if TYPE_CHECKING:
    from poseidon import _core
    from poseidon.torch.exchange.synchronizer import Synchronizer
    from poseidon.torch.model.stored_parameter import StoredParameter
    from poseidon.torch.optimizer.worker_update import WorkerUpdate

SCHEMES = ("auto", "ps", "sfb", "adam")
FACTOR_SCHEMES = ("sfb", "adam")
_KEPT_SUMS = 4  # enough to go back by two attempts
_DENSE_EXCHANGES = 16

SchemeChoice = str | Mapping[str, str]


class SyncedParameter:
    """One parameter, its layer in the client, and what of its gradient waits to be exchanged.

    Its methods run in the thread that runs backward, with the GIL.
    """

    def __init__(self, name: str, param: nn.Parameter, linears: list[nn.Linear], scheme: str, form: DenseForm) -> None:
        self.name = name
        self.param = param
        self.linears = linears  # the modules that may hand over factors; empty where the gradient is always dense
        self.owners: list[nn.Module] = []  # the modules that have it as a parameter of their own
        self.asked_scheme = scheme
        self.scheme = scheme  # as asked for, or ps where the plan settled on it
        self.grouped = False  # so small that it travels with others
        self.form = form  # of what is exchanged for its gradient
        self.layout = form.layout
        self.next_scheme = ""  # the one that the next exchange takes, the same on every rank
        self.layer = -1  # id in the client
        self.unit = (-1, -1)  # equal for parameters that travel together
        self.fully_connected = False  # only nn.Linear modules have it
        self.position = 0  # in the order in which forward uses the parameters
        self.urgency: float | None = None  # of its exchange, once the ranks have agreed on the order
        self.update: WorkerUpdate | None = None  # which updates the parameter when its gradient arrives
        self.forward_rows = 0  # K as forward saw it, until the ranks first agreed on schemes
        self.factor_count = 0  # K of this rank since the last synchronization
        self._refused_factors = False  # some of these rows went into the dense gradient
        self.shared = False  # with another wrapped model
        self.used_elsewhere = False  # the weight is also used outside its Linear modules
        self.factors = Factors()
        self._dense_exchanges = 0  # to come, since gradients are added to what an exchange has left in `.grad`
        self.ready_ns = 0
        self.stored: StoredParameter | None = None  # where servers hold and update the parameter
        self._placeholder: PendingGradient | None = None
        self.factor_sums: dict[int, int] = {}  # K summed over the workers, by the attempts of the last exchanges
        self._sync: Callable[[], Synchronizer | None] = lambda: None
        self._node: Any = None
        self._hooks: list[Any] = []

    @property
    def factorable(self) -> bool:
        """Whether the gradient may travel as factors."""
        return bool(self.linears)

    def new_buffer(self) -> torch.Tensor:
        """Uninitialized memory for what is exchanged, in the layout that all ranks agreed on."""
        layout = self.layout
        return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=self.param.device)

    def core_layer(self) -> _core.Layer:
        """This parameter as the core sees it."""
        from poseidon import _core

        rows, cols = self.param.shape if self.factorable else (0, 0)
        dtype, stored = DTYPE_NAMES[self.layout.dtype], self.stored is not None
        return _core.Layer(self.name, dtype, self.layout.numel(), rows, cols, self.scheme, stored)

    def attach(self, sync: Synchronizer) -> None:
        """Puts the hooks in place: `sync` hears of every backward that reaches this parameter."""
        self._sync = weakref.ref(sync)  # which owns this entry
        # The node lives only as long as someone holds it; its hooks fire also for a missing gradient,
        # once all uses of the parameter have contributed.
        self._node = torch.autograd.graph.get_gradient_edge(self.param).node
        self._hooks = [
            self._node.register_prehook(_calling(self, SyncedParameter._before_accumulation)),
            self._node.register_hook(_calling(self, SyncedParameter._after_accumulation)),
        ]

    def detach(self) -> None:
        """Takes the hooks away again."""
        for hook in self._hooks:
            hook.remove()
        self.capture(False)
        self._hooks, self._sync = [], lambda: None

    def capture(self, wanted: bool) -> None:
        """Whether the modules that have the parameter are to hand over factors from now on."""
        for linear in self.linears:
            forward = linear.__dict__.get("forward")
            if wanted and not self.shared:
                linear.forward = FactorForward(linear, self)  # type: ignore[method-assign]
            elif isinstance(forward, FactorForward) and forward.serves(self):
                del linear.forward

    def start_anew(self) -> None:
        """Forgets what exchanges have left behind, before the layer is added to another client."""
        stored_scheme = "ps" if self.stored is not None else ""
        self.scheme, self.grouped, self.next_scheme = stored_scheme or self.asked_scheme, False, stored_scheme
        self.forward_rows, self._placeholder = 0, None
        self.start_over()

    def share(self) -> None:
        """Another wrapped model has the parameter, too, so that `.grad` may be in two exchanges at once."""
        if self.stored is not None or self.update is not None:
            raise InvalidArgument(
                f"parameter {self.name} is in another wrapped model already, whose DistributedOptimizer updates it: "
                "wrap both models in one module, or use the optimizers themselves"
            )
        self.capture(False)
        self.shared = True

    def check_free(self) -> None:
        """InvalidArgument if a DistributedOptimizer has the parameter already, or cannot have it."""
        if self.shared:
            raise InvalidArgument(
                f"parameter {self.name} is in two wrapped models, so that no DistributedOptimizer can update it: wrap "
                "both models in one module, or use the optimizer itself"
            )
        if self.stored is not None or self.update is not None:
            raise InvalidArgument(f"parameter {self.name} is updated by another DistributedOptimizer already")

    def store(self, stored: StoredParameter) -> None:
        """From now on servers update the parameter, from dense gradients."""
        if isinstance(self.param.grad, PendingGradient):
            self.param.grad.resolve()
        self.resume()
        for linear in self.linears:
            if isinstance(linear.__dict__.get("forward"), FactorForward):
                del linear.forward
        self.stored, self.linears, self.scheme, self.next_scheme, self.grouped = stored, [], "ps", "ps", False

    def _before_accumulation(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        self.resume()
        if (sync := self._sync()) is not None:
            sync.before_accumulation(self, dense=grads[0] is not None)

    def _after_accumulation(self, *_: Any) -> None:
        if (sync := self._sync()) is not None:
            sync.after_accumulation(self)

    @property
    def armed(self) -> bool:
        """Whether the forward pass that runs now is one through the wrapper, or is made again in its backward."""
        sync = self._sync()
        return sync is not None and sync.mode is not Mode.OTHERS

    def _must_be_dense(self, left: torch.Tensor) -> bool:
        param: Any = self.param
        if param._backward_hooks or param._post_accumulate_grad_hooks:  # a hook must be shown the gradient itself
            return True
        rows, cols = param.shape
        if (self.factors.count + left.shape[0]) * (rows + cols) > rows * cols:
            return True
        if self.factors and self.factors.lefts[0].dtype != left.dtype:
            return True
        return not self.may_send(left.dtype)

    def may_send(self, dtype: torch.dtype) -> bool:
        """Whether the next exchange takes factors of this dtype. Before the ranks agreed on a scheme it may be sfb."""
        if self.next_scheme == "adam":
            return dtype == self.param.dtype
        return self.next_scheme in ("", "sfb") and dtype.itemsize <= self.param.dtype.itemsize

    def count_forward_rows(self, row_count: int) -> None:
        """Notes K of one forward call, for the first choice of schemes."""
        self.forward_rows += row_count

    @torch._disable_dynamo
    def take_factors(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Called in backward with the rows of one use of the layer (K×M and K×N).

        True: taken, or not wanted by anybody. False: the caller has to return the dense gradient.
        """
        sync = self._sync()
        # With create_graph the gradient must have a history.
        if sync is None or sync.mode is Mode.OTHERS or torch.is_grad_enabled():
            return False
        try:
            if not torch._C._will_engine_execute_node(self._node):
                return True
        except RuntimeError:  # torch.autograd.grad asks for this very gradient
            return False
        self.resume()
        keep = sync.before_factors(self)
        self.factor_count += left.shape[0]
        if self._must_be_dense(left):
            self._refused_factors = True
            return False
        if keep:  # outlives this backward, while the owner of the rows may write into them
            self.factors.append(_own_copy(left), _own_copy(right))
        else:
            self.factors.append(left.detach().contiguous(), right.detach().contiguous())
        return True

    def known_factor_count(self) -> int | None:
        """K of the gradient that is about to be sent; None where it is no sum of factors."""
        hooked = bool(getattr(self.param, "_backward_hooks", None))
        if not self.factorable or self.used_elsewhere or self.shared or hooked:
            return None
        self._dense_exchanges = max(0, self._dense_exchanges - 1)
        return None if self._dense_exchanges else self.factor_count

    def note_added(self) -> None:
        """Its factors are added to a gradient that an exchange has left, which no factors stand for.

        For some exchanges then the layer is taken for a dense one: every second would be, and go by the wrong scheme.
        """
        self._dense_exchanges = _DENSE_EXCHANGES

    def note_dense_contribution(self) -> None:
        """A dense gradient arrived while the layer sends factors."""
        if not self._refused_factors:
            self.used_elsewhere = True

    def note_factor_sum(self, attempt: int, factor_sum: int) -> None:
        """K summed over the workers, as this attempt's exchange found it: the next one's scheme follows from it."""
        self.factor_sums[attempt] = factor_sum
        if len(self.factor_sums) > _KEPT_SUMS:
            del self.factor_sums[min(self.factor_sums)]

    def factor_sum_before(self, attempt: int) -> int | None:
        """K as the last exchange before this attempt found it; None if there was none."""
        earlier = [number for number in self.factor_sums if number < attempt]
        return self.factor_sums[max(earlier)] if earlier else None

    def start_over(self) -> None:
        """This synchronization has what there was."""
        self.factors, self.factor_count, self._refused_factors = Factors(), 0, False

    def accumulated(self, mode: Mode) -> None:
        """A backward that exchanges nothing has added to the gradient."""
        if mode is Mode.LOCAL:
            self._hold()
            return
        grad: Any = self.param.grad
        # What is added to the mean, such as the gradient of a penalty, is the program's to answer for.
        if self.update is not None and grad is not None and not hasattr(grad, "_poseidon_exchanged"):
            grad._poseidon_alone = grad._version

    def note_exchanged(self, grad: Any) -> None:
        """This tensor, which is in `.grad`, is the mean over the ranks."""
        grad._poseidon_exchanged = True

    def trained_alone(self) -> bool:
        """Whether `.grad` is what a backward left that was none of the wrapper's: this rank's own."""
        grad: Any = raw_grad(self.param)
        version = getattr(grad, "_poseidon_alone", None)
        return version is not None and version == grad._version

    def _hold(self) -> None:
        """Makes `.grad` show what the held factors stand for."""
        if not self.factors:
            return
        if self.param.grad is None:
            self._placeholder = self.param.grad = self.factors.pending_gradient(self.param)
        else:
            with torch.no_grad():
                self.factors.add_to(self.param.grad)
            self.factors = Factors()

    def resume(self) -> None:
        """Takes held factors back out of `.grad`, or drops them if the user cleared or replaced `.grad`."""
        if self._placeholder is None:
            return
        if self.param.grad is self._placeholder:
            self.param.grad = None
            self.factors = self.factors.copy()
        else:
            self.factors = Factors()
        self._placeholder = None


def _own_copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().clone(memory_format=torch.contiguous_format)


def _calling(entry: SyncedParameter, method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does not keep `entry` alive: the node that holds the hook is held by `entry`."""
    reference = weakref.ref(entry)

    def hook(*gradients: Any) -> None:
        target = reference()
        if target is None:
            return
        if compiler is None or compiler() is not None:
            uncompiled(target, *gradients)
        else:
            method(target, *gradients)

    # Where a whole training step is compiled its hooks are not. To say so on every call takes 0.4 µs, to look 0.04.
    uncompiled = torch._disable_dynamo(method)
    leave_uncompiled(hook)
    return hook


def collect_parameters(
    module: nn.Module, scheme: SchemeChoice, default_scheme: str, ignored: Collection[str]
) -> list[SyncedParameter]:
    """The parameters to synchronize, in registration order, tied ones once.

    Raises InvalidArgument naming the parameter or module that cannot be synchronized.
    """
    owners = _owners(module)
    chosen = _SchemeTable(scheme, default_scheme)
    entries = []
    for name, param in module.named_parameters():
        # Choosing also for frozen ones lets a pattern that names only these pass.
        wanted = chosen.of([full for _, _, full in owners[param]])
        if not param.requires_grad or name in ignored or param.numel() == 0:
            continue
        form = form_of(param, sparse=any(_makes_sparse(part) for part, _, _ in owners[param]))
        if form.layout.dtype not in DTYPE_NAMES:
            raise InvalidArgument(
                f"parameter {name} has dtype {param.dtype}, which cannot be synchronized (only "
                f"{', '.join(DTYPE_NAMES.values())} and complex numbers of these can): convert it, or set "
                "requires_grad=False"
            )
        linears = _capturing_linears(param, owners[param])
        if not linears and wanted != "auto":
            wanted = "ps"
        entry = SyncedParameter(name, param, linears, wanted, form)
        entry.owners = [part for part, _, _ in owners[param]]
        entry.fully_connected = all(isinstance(part, nn.Linear) for part, _, _ in owners[param])
        entries.append(entry)
    chosen.check_used()
    return entries


def _makes_sparse(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


_Owner = tuple[nn.Module, str, str]  # module, attribute, full name


def _owners(module: nn.Module) -> dict[nn.Parameter, list[_Owner]]:
    owners: dict[nn.Parameter, list[_Owner]] = {}
    for prefix, part in module.named_modules():
        for attribute, param in part._parameters.items():
            if param is not None:
                full = f"{prefix}.{attribute}" if prefix else attribute
                owners.setdefault(param, []).append((part, attribute, full))
    return owners


def _capturing_linears(param: nn.Parameter, owners: list[_Owner]) -> list[nn.Linear]:
    """The Linear modules whose weight `param` is, if all its owners are such; else none."""
    linears = [
        part
        for part, attribute, _ in owners
        if isinstance(part, nn.Linear) and attribute == "weight" and _is_plain_linear(part)
    ]
    fits = len(linears) == len(owners) and param.dim() == 2 and param.is_contiguous() and not param.is_complex()
    return linears if fits else []


def _is_plain_linear(module: nn.Linear) -> bool:
    own_forward = module.__dict__.get("forward")
    return (
        type(module).forward is nn.Linear.forward
        and (own_forward is None or isinstance(own_forward, FactorForward))
        # MultiheadAttention reads the weight of this one without calling it.
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    )


class _SchemeTable:
    """Which scheme the user wants for which parameter; the first pattern that matches decides."""

    def __init__(self, scheme: SchemeChoice, default: str) -> None:
        self._patterns = dict(scheme) if isinstance(scheme, Mapping) else {"*": scheme}
        self._default = default
        self._unused = set(self._patterns) - {"*"}
        for name in (*self._patterns.values(), default):
            if name not in SCHEMES:
                raise InvalidArgument(f"{name!r} is no scheme: known are {', '.join(SCHEMES)}")

    def of(self, names: list[str]) -> str:
        for pattern, scheme in self._patterns.items():
            if any(_matches(pattern, name) for name in names):
                self._unused.discard(pattern)
                return scheme
        return self._default

    def check_used(self) -> None:
        if self._unused:
            patterns = ", ".join(sorted(map(repr, self._unused)))
            raise InvalidArgument(f"no parameter or module is called {patterns}: correct the mapping of schemes")


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the parameter `name` or a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
