"""One rank's part of a DTensor as a parameter that is synchronized."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from poseidon.errors import InvalidArgument
from poseidon.torch.model.hooks import in_turn, while_alive
from poseidon.torch.model.parameters import BackwardListener, SyncedParameter
from poseidon.torch.model.passes import Mode
from poseidon.torch.tensors.shard import Shard


class ShardedParameter(SyncedParameter):
    """Its gradient comes where that of the DTensor does.

    FSDP puts it into `.grad` of the DTensor, and then calls a hook of that one. In a tensor-parallel model autograd
    accumulates it.
    """

    param: Shard
    unannounced: Callable[[], object] | None = None
    """What is called with the gradient of a forward pass that nobody has heard of; None: that is left alone."""

    @property
    def leaf(self) -> torch.Tensor:
        return self.param if self.param.group is not None else self.whole  # type: ignore[no-any-return]

    def attach(self, listener: BackwardListener, node: Any) -> None:
        super().attach(listener, node)
        self._check_hooks()
        self._handle = None
        if self.param.group is not None:
            before, arrived = super().make_prehook(), super().make_posthook()
            reference = weakref.ref(self)

            def hook(_: Any) -> None:
                if (here := reference()) is not None:
                    here._reduced(before, arrived)

            self._handle = self.whole.register_post_accumulate_grad_hook(hook)
        else:
            self.hear_before()

    def detach(self) -> None:
        super().detach()
        handle = vars(self).pop("_handle", None)
        if handle is not None:
            handle.remove()

    def _reduced(self, before: Callable[..., None], arrived: Callable[..., None]) -> None:
        """FSDP has reduced the gradient, which is in `.grad` of the DTensor."""
        if self.whole.grad is not None and self.param.group.all_reduce_grads:
            listener = self._listener()
            if self.unannounced is not None and listener is not None and listener.mode is Mode.OTHERS:
                self.unannounced()
            before((None,))
            self._prepare()
            arrived(None, (None,))

    def make_posthook(self) -> Callable[..., None]:
        return in_turn(while_alive(self._prepare), super().make_posthook())

    def make_prehook(self) -> Callable[..., None]:
        return in_turn(super().make_prehook(), while_alive(self._show))

    def _show(self, *_: Any) -> None:
        """Autograd is about to add to the DTensor's `.grad`, which must be no stand-in then."""
        self.param.show()

    def _prepare(self, *_: Any) -> None:
        """Makes the gradient that is in `.grad` of the DTensor that of this part, and gives it memory of its own."""
        self._check_hooks()
        whole, listener = self.whole, self._listener()
        grad = whole.grad
        if listener is None or grad is None:
            return
        if tuple(grad.placements) != tuple(whole.placements):  # tensor parallelism leaves sums that nobody has made
            whole.grad = grad.redistribute(placements=whole.placements)
        if listener.mode is Mode.EXCHANGED:
            self.param.own()

    def _check_hooks(self) -> None:
        """Other hooks of the same kind would see the gradient before it is the mean over the replicas."""
        hooks = getattr(self.whole, "_post_accumulate_grad_hooks", None) or {}
        if any(getattr(hook, "__module__", None) != __name__ for hook in hooks.values()):
            raise InvalidArgument(
                f"parameter {self.name} has a hook by register_post_accumulate_grad_hook(), which would see this "
                "rank's own gradient: use the gradient after backward()"
            )
