"""One rank's part of a DTensor, as a parameter of its own.

The part lies in the DTensor's memory. Its gradient is what is exchanged, and has memory of its own. The DTensor's
`.grad` shows it: a stand-in that makes a DTensor of it once somebody needs the values. What the program puts there
becomes the part's gradient.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from poseidon.errors import InvalidArgument
from poseidon.torch.tensors.ownership import holders
from poseidon.torch.tensors.pending_gradient import GradientGone, PendingGradient
from poseidon.torch.tensors.watched import Linked, plain_grad, raw_grad

_HOLDERS_WITH_FSDP = 4  # which keeps it flat, and as a view of that (torch 2.13)


def kind_of(param: Any) -> Any:
    """The class of a DTensor, without telling who watches it."""
    return getattr(type(param), "_poseidon_class", type(param))


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor, of which this rank has a part."""
    return hasattr(kind_of(tensor), "_local_tensor")


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: of a DTensor its part."""
    return local_part(tensor) if is_dtensor(tensor) else tensor


def local_part(param: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without telling who watches it."""
    return kind_of(param)._local_tensor.__get__(param)  # type: ignore[no-any-return]


class ShardGradient(PendingGradient):
    """Stands for the gradient of a DTensor, for which it passes: what it does not have it asks that gradient for."""

    kind: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # type: ignore[override]
        return self.kind or type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("value", "kind"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)


class Shard(Linked, nn.Parameter):
    """This rank's part of a DTensor, `whole`. Used from the thread that trains or runs backward."""

    whole: Any
    group: Any
    """FSDP's group that the DTensor is in, if any. It may be told not to exchange gradients between replicas."""

    _shown: Any  # what stands in the DTensor's `.grad` for the gradient of this part

    @staticmethod
    def of(name: str, whole: Any) -> Shard:
        """The part of the parameter of this name. InvalidArgument for a DTensor of which no rank has a part."""
        part = local_part(whole)
        if type(part) is not torch.Tensor:
            raise InvalidArgument(
                f"the parts of parameter {name} are of class {type(part).__name__}, whose gradients Poseidon does not "
                "know: leave the extension that makes it out, or freeze the parameter"
            )
        if any(placement.is_partial() for placement in whole.placements):
            raise InvalidArgument(
                f"parameter {name} is a DTensor with placements {whole.placements}, of which no rank has a part: "
                "redistribute it first"
            )
        shard = Shard(part.detach(), whole.requires_grad)
        shard.whole, shard.group, shard._shown = whole, None, None
        return shard

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        return raw_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        plain_grad.__set__(self, value)
        self._shown = None if value is None else self._stand_in(value)
        self.whole.grad = self._shown

    def take_in(self) -> None:
        shown = raw_grad(self.whole)
        if shown is not self._shown:  # the program, FSDP, autograd or another wrapper's part has put it there
            shown = shown.resolve() if isinstance(shown, PendingGradient) else shown
            plain_grad.__set__(self, None if shown is None else local_part(shown))  # type: ignore[attr-defined]
            self._shown = shown

    def is_exposed(self) -> bool:
        """Whether others have its memory than this part, the DTensor and FSDP."""
        return holders(self) > (2 if self.group is None else _HOLDERS_WITH_FSDP)

    def show(self) -> None:
        """Makes the DTensor's `.grad` a DTensor, for code that is not to meet a stand-in. It waits for the gradient."""
        self.take_in()
        if isinstance(self._shown, PendingGradient):
            self._shown.resolve()

    def own(self) -> None:
        """Gives the gradient memory of its own: FSDP makes parts of one tensor of those of several parameters."""
        grad = raw_grad(self)
        self.grad = None if grad is None else grad.clone()

    def _stand_in(self, value: torch.Tensor) -> PendingGradient:
        zero_later = value.zeroes_later if isinstance(value, PendingGradient) else None
        reference = weakref.ref(self)  # Python's garbage collector does not see what is in `.grad`

        def resolve(_: PendingGradient) -> torch.Tensor:
            if (shard := reference()) is None:
                raise GradientGone("the gradient is that of a model that does not exist any more: read it before")
            return shard._made()

        stand_in = ShardGradient.make(self.whole, resolve, zero_later)
        stand_in.kind = kind_of(self.whole)
        return stand_in

    def _made(self) -> torch.Tensor:
        """The DTensor of the gradient, which is in `.grad` of the other one from now on."""
        value = plain_grad.__get__(self)
        if isinstance(value, PendingGradient):
            value = value.resolve()
        whole = self.whole
        made = kind_of(whole).from_local(
            value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        if raw_grad(whole) is self._shown:
            self._shown = whole.grad = made
        return made  # type: ignore[no-any-return]
