"""Poseidon's class in the place of torch's, beside torch.distributed: arguments, groups, hooks, Join."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import all_equal, assert_close, assert_gradients_close, digest, mean_loss, mlp, parameters_digest

Wrapper = Callable[..., nn.Module]
TORCHS = inspect.signature(TorchDistributedDataParallel.__init__).parameters


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 48, generator=generator), torch.randn(4, 4, generator=generator)


def train(model: nn.Module, steps: int = 3, rank: int | None = None) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model, *batch(step, dist.get_rank() if rank is None else rank)).backward()
        optimizer.step()
    return model


def in_a_world(world_size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs `case` on ranks for which torch.distributed is initialized and poseidon.init() is left out."""
    answers = workers.run_fresh(world_size, with_gloo, case, args, TORCH_GLOO_LAZY_INIT="0")
    failures = [f"rank {rank}: {a.trace}" for rank, a in enumerate(answers) if isinstance(a, workers.Failure)]
    assert not failures, "\n".join(failures)
    return answers


def with_gloo(case: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.init_process_group("gloo")
    try:
        return case(*args)
    finally:
        poseidon.shutdown()
        dist.destroy_process_group()


# It is torch's class, and takes what that takes.


def test_every_argument_of_torchs_class_is_one_of_ours() -> None:
    ours = inspect.signature(poseidon.DistributedDataParallel.__init__).parameters
    for name, theirs in TORCHS.items():
        assert name in ours
        # Until torch 2.13 the default was True, which None means.
        assert ours[name].default == theirs.default or name == "broadcast_buffers"


def same_as_torchs(options: dict[str, Any]) -> str:
    ours = train(poseidon.DistributedDataParallel(mlp(), **options))
    theirs = train(TorchDistributedDataParallel(mlp(), **options))
    assert isinstance(ours, TorchDistributedDataParallel)
    assert_close(ours, theirs, 1e-6)
    assert ours.process_group is dist.group.WORLD
    return parameters_digest(ours)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "bucket_cap_mb": 1,
            "gradient_as_bucket_view": True,
            "static_graph": True,
            "dim": 0,
            "device_ids": None,
        },
        {"find_unused_parameters": True, "check_reduction": False, "bucket_cap_mb": None},
    ],
)
def test_trains_as_torchs_class_does(options: dict[str, Any]) -> None:
    assert all_equal(in_a_world(2, same_as_torchs, options))


def positional() -> str:
    defaults = {name: one.default for name, one in TORCHS.items() if name not in ("self", "module")}
    wanted = {**defaults, "broadcast_buffers": False, "find_unused_parameters": True, "process_group": dist.group.WORLD}
    model = poseidon.DistributedDataParallel(mlp(), *(value for value in wanted.values()))
    assert not model.broadcast_buffers
    assert model.find_unused_parameters
    return parameters_digest(train(model))


@pytest.mark.filterwarnings("ignore:broadcast_buffers")
def test_arguments_by_position() -> None:
    assert all_equal(in_a_world(2, positional))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bucket_cap": 3}, "no argument 'bucket_cap'"),
    ({"mixed_precision": object()}, "torch.autocast"),
    ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "delay_all_reduce_named_params"),
    ({"process_group": "world"}, "process_group is of type str"),
    ({"device_ids": [0, 1]}, "device_ids can only be None or contain a single element"),
]


def refusals() -> list[str]:
    texts = []
    for options, _ in REFUSED:
        with pytest.raises(InvalidArgument) as caught:
            poseidon.DistributedDataParallel(mlp(), **options)
        texts.append(str(caught.value))
    dist.barrier()  # the first attempt has connected the ranks; both have to be done with that before one leaves
    return texts


def test_refused_in_one_sentence() -> None:
    for texts in in_a_world(2, refusals):
        for text, (_, words) in zip(texts, REFUSED, strict=True):
            assert words in text
            assert "scheme" not in text
            assert ". " not in text.replace("e.g. ", "")


def delayed() -> str:
    module, reference = mlp(), mlp()
    late = [("0.weight", module[0].weight), ("0.bias", module[0].bias)]
    model = poseidon.DistributedDataParallel(
        module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[2].weight
    )
    train(model)
    assert_close(module, train(TorchDistributedDataParallel(reference)).module, 1e-6)
    return parameters_digest(module)


def test_delayed_parameters_are_exchanged_all_the_same() -> None:
    assert all_equal(in_a_world(2, delayed))


# Parts of the world.


def in_part(by_mesh: bool) -> str:
    if by_mesh:  # two rows of two: each row trains a model of its own
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"]
        options: dict[str, Any] = {"device_mesh": mesh}
        group = mesh.get_group()
    else:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group = next(group for group in groups if dist.get_rank(group) >= 0)
        options = {"process_group": group}
    model = poseidon.DistributedDataParallel(mlp(), **options)
    train(model)
    assert_close(model.module, train(TorchDistributedDataParallel(mlp(), process_group=group)).module, 1e-6)
    whole = train(poseidon.DistributedDataParallel(mlp()))
    return f"{parameters_digest(model)} {parameters_digest(whole)}"


@pytest.mark.parametrize("by_mesh", [False, True])
def test_parts_of_the_world_train_by_themselves(by_mesh: bool) -> None:
    answers = in_a_world(4, in_part, by_mesh)
    pairs = ((0, 1), (2, 3)) if by_mesh else ((0, 3), (1, 2))
    parts, wholes = zip(*(answer.split() for answer in answers), strict=True)
    assert all(parts[one] == parts[other] for one, other in pairs)
    assert parts[0] != parts[2]
    assert all_equal(list(wholes))


# Hooks.


def hooked(name: str) -> str:
    hooks: dict[str, Callable[[nn.Module], None]] = {
        "allreduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
        "fp16": lambda model: model.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        ),
        "power": lambda model: model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1.5),
            powerSGD_hook.powerSGD_hook,
        ),
        "optimizer": lambda model: model._register_fused_optim(torch.optim.SGD, 1e-2),
    }
    ours, theirs = poseidon.DistributedDataParallel(mlp()), TorchDistributedDataParallel(mlp())
    for model in (ours, theirs):
        hooks[name](model)
        train(model)
    assert_close(ours, theirs, 1e-5)
    return parameters_digest(ours)


@pytest.mark.parametrize("name", ["allreduce", "fp16", "power", "optimizer"])
def test_communication_hooks_run(name: str) -> None:
    assert all_equal(in_a_world(2, hooked, name))


def hook_and_overlap() -> list[str]:
    texts = []
    first, second = (poseidon.DistributedDataParallel(mlp()) for _ in range(2))
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    first.register_comm_hook(None, wrapped)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(InvalidArgument) as caught:
        poseidon.DistributedOptimizer(optimizer, first)
    texts.append(str(caught.value))
    poseidon.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second)
    with pytest.raises(InvalidArgument) as caught:
        second.register_comm_hook(None, wrapped)
    texts.append(str(caught.value))
    return texts


def test_a_communication_hook_and_a_distributed_optimizer_exclude_each_other() -> None:
    for first, second in in_a_world(2, hook_and_overlap):
        assert "fp16_compress_wrapper" in first
        assert "DistributedOptimizer" in second


def hook_alone() -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument) as caught:
        model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    return str(caught.value)


def test_a_communication_hook_needs_torch_distributed() -> None:
    assert all("init_process_group" in text for text in workers.run_fresh(2, hook_alone))


def compressed(wire: str, overlapped: bool, first_steps: int) -> tuple[list[str], list[str]]:
    """The wire formats and the bits of a model with torch's hook, and of one with the wire format."""
    hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[wire]
    models = [poseidon.DistributedDataParallel(mlp(), wire=own) for own in ("fp32", "fp32" if first_steps else wire)]
    for model in models:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if overlapped:
            optimizer = poseidon.DistributedOptimizer(optimizer, model)
        for step in range(4):
            if step == first_steps and model is models[0]:
                model.register_comm_hook(None, hook)
            optimizer.zero_grad()
            mean_loss(model, *batch(step, poseidon.rank())).backward()
            optimizer.step()
    return [row.wire for row in models[0].plan()], [parameters_digest(model) for model in models]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_torchs_compression_hooks_set_the_wire_format(wire: str, overlapped: bool) -> None:
    for formats, (hooked_bits, told_bits) in in_a_world(2, compressed, wire, overlapped, 0):
        assert formats == [wire] * len(formats)
        assert hooked_bits == told_bits


def test_a_compression_hook_holds_from_its_registration_on() -> None:
    answers = in_a_world(2, compressed, "fp16", False, 2)
    assert all_equal([bits[0] for _, bits in answers])
    assert answers[0][1][0] != answers[0][1][1]  # the other model never rounds


def hooks_that_do_not_fit() -> list[str]:
    texts = []
    held = poseidon.DistributedDataParallel(mlp())
    poseidon.DistributedOptimizer(torch.optim.SGD(held.parameters(), lr=0.1), held, update="server")
    by_scheme = poseidon.DistributedDataParallel(mlp(), scheme="project_adam")
    for model in (held, by_scheme):
        with pytest.raises(InvalidArgument) as caught:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        texts.append(str(caught.value))
    return texts


def test_a_compression_hook_is_refused_where_nothing_can_be_rounded() -> None:
    for held, by_scheme in in_a_world(2, hooks_that_do_not_fit):
        assert "call register_comm_hook before DistributedOptimizer" in held
        assert "sends numbers as they are" in by_scheme


def compressed_among_others() -> tuple[bool, bool]:
    """Whether the hook runs over torch.distributed, for the group of all and for a group of this rank alone."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    runs = []
    for group in (dist.new_group(list(range(dist.get_world_size()))), alone):
        model = poseidon.DistributedDataParallel(mlp())
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        assert model.synchronizer is not None
        runs.append(model.synchronizer.hooked is not None)
    return runs[0], runs[1]


def test_a_compression_hook_for_other_ranks_runs_as_it_is() -> None:
    assert in_a_world(2, compressed_among_others) == [(False, True)] * 2


# What programs call beside forward.


def surface() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    assert model.device == torch.device("cpu")
    assert model.device_ids is None
    assert model.require_forward_param_sync
    inputs, targets = batch(0, dist.get_rank())
    # Gradients accumulated by the module itself, exchanged by the last backward (as Accelerate does).
    with model.no_sync():
        F.mse_loss(model(inputs), targets).backward()
    model.require_backward_grad_sync = True
    loss = F.mse_loss(model.module(inputs), targets)
    model.reducer.prepare_for_backward([])
    loss.backward()
    reference = TorchDistributedDataParallel(mlp())
    with reference.no_sync():
        F.mse_loss(reference(inputs), targets).backward()
    F.mse_loss(reference(inputs), targets).backward()
    assert_gradients_close(model, reference)
    data = model._get_ddp_logging_data()
    assert data["world_size"] == dist.get_world_size()
    assert data["num_parameter_tensors"] == 6
    assert data["total_parameter_size_bytes"] == sum(param.nbytes for param in model.parameters())
    with pytest.raises(AttributeError, match="no reducer"):
        model.reducer._get_local_used_map()
    return digest(param.grad for param in model.parameters())


def test_what_programs_call_beside_forward() -> None:
    assert all_equal(in_a_world(2, surface))


def checkpointed() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    train(model)
    state = get_model_state_dict(model)
    assert list(state) == list(mlp().state_dict())
    other = poseidon.DistributedDataParallel(mlp())
    set_model_state_dict(other, state)
    assert parameters_digest(other) == parameters_digest(model)
    return parameters_digest(other)


def test_the_state_dict_of_torchs_distributed_checkpoints() -> None:
    assert all_equal(in_a_world(2, checkpointed))


def uneven(wrapper: Wrapper, divide_by_initial: bool, with_optimizer: bool) -> nn.Module:
    model = wrapper(nn.Sequential(mlp(), nn.BatchNorm1d(4)))
    optimizer: Any
    if with_optimizer:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
        joined: Any = Join([model, optimizer], divide_by_initial_world_size=divide_by_initial)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        joined = model.join(divide_by_initial_world_size=divide_by_initial)
    with joined:
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            mean_loss(model, *batch(step, dist.get_rank())).backward()
            optimizer.step()
    return model


def uneven_as_torchs(divide_by_initial: bool, with_optimizer: bool) -> str:
    ours = uneven(poseidon.DistributedDataParallel, divide_by_initial, with_optimizer)
    theirs = uneven(TorchDistributedDataParallel, divide_by_initial, with_optimizer)
    assert_close(ours, theirs, 1e-5)
    return digest([*ours.parameters(), *ours.buffers()])


@pytest.mark.parametrize("divide_by_initial", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_join(divide_by_initial: bool, with_optimizer: bool) -> None:
    assert all_equal(in_a_world(2, uneven_as_torchs, divide_by_initial, with_optimizer))


def join_that_fails() -> str:
    model, other = (poseidon.DistributedDataParallel(mlp()) for _ in range(2))
    with pytest.raises(ZeroDivisionError), model.join():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), Join([model, other]):
        raise ZeroDivisionError
    with other.join():
        with pytest.raises(InvalidArgument, match=r"join\(\) of another model and join\(\) exclude each other"):
            model.join()
        for step in range(dist.get_rank()):
            mean_loss(other, *batch(step, dist.get_rank())).backward()
    return parameters_digest(other)


def test_a_join_that_has_ended_by_an_error_is_over() -> None:
    assert all_equal(in_a_world(2, join_that_fails))


def uneven_by_hook(wrapper: Wrapper) -> nn.Module:
    model: Any = wrapper(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(2 * dist.get_rank()):
            optimizer.zero_grad()
            mean_loss(model, *batch(step, dist.get_rank())).backward()
            optimizer.step()
    return model


def uneven_by_hook_as_torchs() -> str:
    ours: Any = uneven_by_hook(poseidon.DistributedDataParallel)
    assert_close(ours, uneven_by_hook(TorchDistributedDataParallel), 1e-3)  # a half's rounding
    assert ours._get_ddp_logging_data()["join_uneven_inputs"]
    assert ours._authoritative_rank == 1
    return parameters_digest(ours)


def test_join_with_a_communication_hook() -> None:
    assert all_equal(in_a_world(2, uneven_by_hook_as_torchs))


def wrapped_again(wrapper: Wrapper) -> nn.Module:
    """Trains a module by a second wrapper while the first one is still there on one rank."""
    module = mlp()
    first = [train(wrapper(module))]
    if dist.get_rank() == 0:
        first.clear()
    gc.collect()
    return train(wrapper(module))


def wrapped_again_as_torchs() -> str:
    ours = wrapped_again(poseidon.DistributedDataParallel)
    assert_close(ours, wrapped_again(TorchDistributedDataParallel), 1e-5)
    return parameters_digest(ours)


def test_a_wrapper_that_is_not_used_any_more_exchanges_nothing() -> None:
    assert all_equal(in_a_world(2, wrapped_again_as_torchs))


def part_wrapped_before(wrapper: Wrapper) -> nn.Module:
    """Trains a model whose first part has a wrapper, too, which is still there on one rank."""
    torch.manual_seed(3)
    part = nn.Linear(48, 16)
    first = [wrapper(part)]
    first[0](batch(0, 0)[0]).sum().backward()
    if dist.get_rank() == 0:
        first.clear()
    gc.collect()
    torch.manual_seed(4)
    return train(wrapper(nn.Sequential(part, nn.Linear(16, 4))))


def part_wrapped_before_as_torchs() -> str:
    ours = part_wrapped_before(poseidon.DistributedDataParallel)
    assert_close(ours, part_wrapped_before(TorchDistributedDataParallel), 1e-5)
    return parameters_digest(ours)


def test_a_wrapper_that_only_one_rank_still_has_does_not_matter() -> None:
    assert all_equal(in_a_world(2, part_wrapped_before_as_torchs))


def compiled(wrapper: Wrapper, around: bool) -> nn.Module:
    module = nn.Sequential(mlp(), nn.BatchNorm1d(4))
    model = wrapper(module if around else torch.compile(module, backend="aot_eager"))
    train(torch.compile(model, backend="aot_eager") if around else model)
    return model


def compiled_as_torchs(around: bool) -> str:
    ours, theirs = compiled(poseidon.DistributedDataParallel, around), compiled(TorchDistributedDataParallel, around)
    assert_close(ours, theirs, 1e-5)
    return parameters_digest(ours)


@pytest.mark.parametrize("around", [False, True])
def test_torch_compile(around: bool) -> None:
    assert all_equal(in_a_world(2, compiled_as_torchs, around))
