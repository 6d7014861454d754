"""`PoseidonStrategy`: Lightning's DDPStrategy with Poseidon's class."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.lightning.package import imported_package
from poseidon.torch.optimizer.distributed_optimizer import DistributedOptimizer
from poseidon.torch.process.context import init


def strategy_class(package: str) -> type[Any]:
    """PoseidonStrategy for the Trainer of `package`: lightning.pytorch or pytorch_lightning.

    A program that has imported both packages needs it, because they know nothing of each other."""
    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy

    class PoseidonStrategy(base):  # type: ignore[misc]
        """Lightning's DDPStrategy with Poseidon's DistributedDataParallel instead of torch's.

        `overlap` puts a `poseidon.DistributedOptimizer` around each optimizer. It is True, or a dict of arguments such
        as `{"update": "server"}`. `options` are those of `poseidon.init()`, which the strategy calls unless the program
        has called it. The other arguments are DDPStrategy's. Those that it passes on to torch's class go to Poseidon's
        class, such as `scheme`. Collective, as all of Lightning's strategies.
        """

        optimizers: Any

        def __init__(
            self,
            *args: Any,
            overlap: bool | Mapping[str, Any] = False,
            options: Mapping[str, Any] | None = None,
            **kwargs: Any,
        ) -> None:
            super().__init__(*args, **kwargs)
            if not isinstance(overlap, bool | Mapping):
                raise InvalidArgument(
                    f"overlap is {overlap!r}: pass True, False or a dict of DistributedOptimizer's arguments"
                )
            self._overlap = overlap
            self._options = options

        def setup_distributed(self) -> None:
            """Starts torch.distributed, as DDPStrategy does, and joins the job."""
            super().setup_distributed()
            if self._options is not None:
                init(**self._options)

        def _setup_model(self, model: Any) -> DistributedDataParallel:
            return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

        def setup_optimizers(self, trainer: Any) -> None:
            """Makes the module's optimizers, and those that overlap if they are to."""
            super().setup_optimizers(trainer)
            if self._overlap is False:
                return
            arguments = {} if self._overlap is True else self._overlap
            self.optimizers = [DistributedOptimizer(opt, self.model, **arguments) for opt in self.optimizers]

    PoseidonStrategy.__qualname__ = "PoseidonStrategy"  # by which it is pickled, for processes that are spawned
    return PoseidonStrategy


PoseidonStrategy = strategy_class(imported_package())
