"""One rank's part of a DTensor as a parameter that is synchronized."""

from __future__ import annotations

import weakref
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.torch.model.hooks import accumulating_nodes, posthook, prehook
from poseidon.torch.model.parameters import BackwardListener, SyncedParameter
from poseidon.torch.model.passes import Mode
from poseidon.torch.tensors.shard import Shard


class ShardedParameter(SyncedParameter):
    """Its gradient comes where that of the DTensor does. FSDP and autograd tell of it by the same hook, once it is in
    `.grad`.
    """

    param: Shard

    def attach(self, listener: BackwardListener, node: Any) -> None:
        super().attach(listener, node)
        self._check_hooks()
        reference = weakref.ref(self)

        def after(_: Any) -> None:
            if (here := reference()) is not None:
                here._arrived()

        self._handles = [self.whole.register_post_accumulate_grad_hook(after)]
        self._before, self._after = prehook(self), posthook(self)
        if self.param.group is None:  # autograd adds to the DTensor's `.grad`
            (self._whole_node,) = accumulating_nodes([self.whole])
            self._handles.append(self._whole_node.register_prehook(_Prehook(self)))

    def detach(self) -> None:
        super().detach()
        for handle in vars(self).pop("_handles", ()):
            handle.remove()

    def _arrived(self) -> None:
        """The gradient is in `.grad` of the DTensor."""
        self._check_hooks()
        whole, group, listener = self.whole, self.param.group, self._listener()
        grad = whole.grad
        if listener is None or grad is None or (group is not None and not group.all_reduce_grads):
            return
        if tuple(grad.placements) != tuple(whole.placements):  # tensor parallelism leaves sums that nobody has made
            whole.grad = grad.redistribute(placements=whole.placements)
        if group is not None:
            self._before((None,))
        if listener.mode is Mode.EXCHANGED:
            self.param.own()
        self._after(None, (None,))

    def _check_hooks(self) -> None:
        """Other hooks of the same kind would see the gradient before it is the mean over the replicas."""
        hooks = getattr(self.whole, "_post_accumulate_grad_hooks", None) or {}
        if any(getattr(hook, "__module__", None) != __name__ for hook in hooks.values()):
            raise InvalidArgument(
                f"parameter {self.name} has a hook by register_post_accumulate_grad_hook(), which would see this "
                "rank's own gradient: use the gradient after backward()"
            )


class _Prehook:
    """Before autograd adds to the DTensor's `.grad`, that is no stand-in. It keeps no model alive."""

    def __init__(self, entry: ShardedParameter) -> None:
        self._entry = weakref.ref(entry)

    def __call__(self, gradients: Any) -> None:
        if (entry := self._entry()) is not None:
            entry._before(gradients)
            entry.param.show()
