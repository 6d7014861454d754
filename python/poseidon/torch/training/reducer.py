"""Answers the questions that programs ask the `reducer` and the logging data of torch's class."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel

from poseidon.torch.training.trained_model import TrainedModel, Wrapper


class Reducer:
    """Replaces `torch.distributed.Reducer`: it has the methods that programs call on `model.reducer`."""

    def __init__(self, model: Wrapper) -> None:
        self._model = weakref.ref(model)
        self._kept = model.trained_model()  # which goes on to exchange gradients when the wrapper is dropped

    def _trained(self) -> TrainedModel:
        model = self._model()
        return self._kept if model is None else model.trained_model()

    def prepare_for_forward(self) -> None:
        """Nothing has to be prepared."""

    def prepare_for_backward(self, output: Sequence[torch.Tensor]) -> None:
        """The next backward pass exchanges gradients, whichever forward pass it belongs to: one of `no_sync()`, too."""
        self._trained().demand_exchange()

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were made anew: there are none."""
        return False

    def _delay_all_reduce(self) -> None:
        """With a static graph torch exchanges its first gradients only now; here they are exchanged already."""

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """torch waits for these at the end of backward; here they are over at once."""
        torch.futures.wait_all(list(futures))

    def _remove_autograd_hooks(self) -> None:
        """Backward passes are the module's own again."""
        self._trained().detach()

    def _check_reducer_finalized(self) -> None:
        """PoseidonError if the last backward failed half way."""
        sync = self._trained().sync
        if sync is not None:
            sync.check_usable()

    def _ddp_graph_static(self) -> bool:
        """Whether all backward passes so far reached the same parameters."""
        return self._trained().same_graph

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Times are kept by `model.record()`, for every step."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Poseidon's DistributedDataParallel has no reducer.{name}: there are no buckets to look into; "
            "model.plan() and model.synchronization_stats() tell what is exchanged"
        )


def logging_data(
    model: TorchDistributedDataParallel, trained: TrainedModel, comm_hook_name: str, error: str
) -> dict[str, Any]:
    """What `_get_ddp_logging_data()` of torch's class tells, as far as it has a meaning without buckets."""
    params = [entry.param for entry in trained.entries]
    run = None if trained.sync is None else trained.sync.runs.last
    ready = [] if run is None else [trained.entries.index(entry) for entry in run.started]
    devices = model.device_ids or []
    dtypes = sorted({_c_name(param.dtype) for param in params})
    data: dict[str, Any] = {
        "rank": trained.context.rank,
        "world_size": trained.context.world_size,
        "backend_name": "poseidon",
        "module_name": type(model.module).__name__,
        "device_ids": ", ".join(map(str, devices)),
        "output_device": -1 if model.output_device is None else model.output_device,
        "broadcast_buffers": int(model.broadcast_buffers),
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "static_graph": int(model.static_graph),
        "can_set_static_graph": 0,  # which advises to set it, as Lightning does; nothing would get faster
        "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in model.module.modules())),
        "is_multi_device_module": 0,
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "dtypes": ", ".join(dtypes),
        "num_parameter_tensors": len(params),
        "total_parameter_size_bytes": sum(param.nbytes for param in params),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, ready)),
        "iteration": trained.step_count,
    }
    if comm_hook_name:
        data["comm_hook"] = comm_hook_name
    if trained.last_joined is not None:
        data["join_uneven_inputs"] = 1
    if error:
        data.update(has_error=1, error=error)
    return data


def _c_name(dtype: torch.dtype) -> str:
    """As C++ calls it, which is what torch tells."""
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
