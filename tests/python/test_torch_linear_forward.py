"""What programs and tools find in the Linear modules of a wrapped model: torch's own."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from overlap_cases import Model
from torch_cases import all_equal, assert_gradients_close, digest, mlp_batch, own_rows, parameters_digest


class Scaled(nn.Linear):
    """A subclass that has no forward of its own."""


class Doubled(nn.Linear):
    """A subclass that calls that of its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def net(*, scriptable: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Linear(64, 4) if scriptable else Doubled(64, 4)  # torch.jit compiles no super()
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), Scaled(64, 64, bias=False), nn.Tanh(), last)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def trained(overlap: bool = False, **options: Any) -> tuple[Any, Any]:
    model = Model(net(**options), scheme="sfb")
    optimizer: Any = sgd(model.parameters())
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    for step in range(2):
        train_step(model, optimizer, step)
    return model, optimizer


def train_step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    inputs, targets = map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def sends_factors(model: Any, *names: str) -> bool:
    """Whether these do, or the first two Linear layers. The last one's class may have a forward of its own."""
    counts = {layer.name: layer.factor_count for layer in model.synchronization_stats()}
    return all(counts[name] == 8 for name in names or ("0.weight", "2.weight"))


# torch.jit.


def scripted(overlap: bool) -> str:
    model, optimizer = trained(overlap, scriptable=True)
    inputs = torch.ones(3, 48)
    program = torch.jit.script(model.module)
    assert torch.equal(program(inputs), model.module(inputs))
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(inputs), program(inputs))
    train_step(model, optimizer, 2)
    if overlap:
        optimizer.synchronize()
    assert torch.equal(program(inputs), model.module(inputs))  # they share parameters
    assert sends_factors(model)
    return parameters_digest(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapped_module_is_scripted(overlap: bool) -> None:
    assert all_equal(workers.run(2, scripted, overlap))


def scripted_beside_training() -> list[float]:
    """A program that was made once, and evaluates after each step before anybody else uses the parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 4))
    model = Model(module, scheme="ps")
    optimizer = poseidon.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1e-3), model)
    program, inputs, seen = torch.jit.script(module), torch.ones(2, 1200), []
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs + poseidon.rank()).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            seen.append(program(inputs).sum().item())
            assert seen[-1] == pytest.approx(module(inputs).sum().item(), rel=1e-5)
    return seen


@pytest.mark.filterwarnings("ignore:step. waits for the gradients")
def test_a_scripted_module_sees_every_update() -> None:
    assert all_equal(workers.run(2, scripted_beside_training))


# Copies, and what looks at a module.


def deep(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    made = pickle.dumps(module)
    assert b"poseidon" not in made
    return pickle.loads(made)


def by_a_graph(module: nn.Module) -> nn.Module:
    traced = torch.fx.symbolic_trace(module)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 3  # of torch's own classes
    return traced


def by_a_trace(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(3, 48))


def by_the_compiler(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


COPIES: list[Callable[[nn.Module], nn.Module]] = [deep, pickled, by_a_graph, by_a_trace, by_the_compiler]


def copied() -> str:
    model, optimizer = trained()
    inputs = torch.ones(3, 48)
    for make in COPIES:
        torch.testing.assert_close(make(model.module)(inputs), model.module(inputs), msg=make.__name__)
    train_step(model, optimizer, 2)
    assert sends_factors(model)
    return parameters_digest(model)


def test_tools_take_a_wrapped_module_for_torchs() -> None:
    assert all_equal(workers.run(2, copied))


def shallow() -> float:
    """A shallow copy has a table of parameters of its own, and computes with what is in it."""
    model, _ = trained()
    first = model.module[0]
    assert vars(first).keys() == vars(nn.Linear(48, 64)).keys()
    other = copy.copy(first)
    other._parameters = dict(first._parameters)
    other.weight = nn.Parameter(torch.zeros(64, 48))
    assert torch.equal(other(torch.ones(1, 48))[0], first.bias)
    return first(torch.ones(1, 48)).sum().item()


def test_a_shallow_copy_computes_with_its_own_parameters() -> None:
    assert all_equal(workers.run(2, shallow))


WITHOUT_POSEIDON = """
import sys
sys.modules["poseidon"] = None
import torch
from torch import nn
module = torch.load(sys.argv[1], weights_only=False)
assert nn.Linear.forward.__globals__ is vars(nn.modules.linear)
print(module(torch.ones(1, 48)).sum().item())
program = torch.jit.script(module)
print(program(torch.ones(1, 48)).sum().item())
"""


def saved(path: str) -> float:
    model, _ = trained(scriptable=True)
    module = nn.Sequential(model.module[0], nn.Tanh())
    module.kept = [module[0].forward, nn.Linear.forward]  # saved by their names
    if poseidon.rank() == 0:
        torch.save(module, path)
    return module(torch.ones(1, 48)).sum().item()


def test_what_is_saved_runs_and_is_scripted_without_poseidon(tmp_path: Any) -> None:
    path = str(tmp_path / "module.pt")
    expected = workers.run(2, saved, path)[0]
    said = subprocess.run([sys.executable, "-c", WITHOUT_POSEIDON, path], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert [float(line) for line in said.stdout.split()] == pytest.approx([expected, expected])


# Who else replaces a forward.


def replaced_on_an_object() -> list[float]:
    """After wrapping, as hooks of accelerate do, and put back as they do."""
    model, optimizer = trained()
    second = model.module[2]
    before = second.forward
    second.forward = lambda x: 3 * before(x)
    inputs = torch.ones(2, 48)
    tripled = model.module[:3](inputs)
    train_step(model, optimizer, 2)
    second.forward = before
    train_step(model, optimizer, 3)
    assert sends_factors(model)
    del second.forward
    train_step(model, optimizer, 4)
    return [tripled.sum().item(), *(param.sum().item() for param in model.parameters())]


def test_a_forward_that_is_replaced_on_a_module() -> None:
    assert all_equal(workers.run(2, replaced_on_an_object))


def replaced_in_the_class() -> list[float]:
    """After wrapping, by a function that calls the one before; then a model is wrapped under it."""
    model, optimizer = trained()
    before, calls = nn.Linear.forward, []

    def counting(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return before(self, x)

    nn.Linear.forward = counting
    try:
        train_step(model, optimizer, 2)
        assert len(calls) == 3
        later = Model(net(), scheme="auto")
        train_step(later, sgd(later.parameters()), 0)
        assert len(calls) == 6
        assert nn.Linear.forward is counting
    finally:
        nn.Linear.forward = before
    train_step(model, optimizer, 3)
    assert sends_factors(model)
    return [param.sum().item() for made in (model, later) for param in made.parameters()]


def test_a_forward_that_is_replaced_in_the_class() -> None:
    assert all_equal(workers.run(2, replaced_in_the_class))


BEFORE_POSEIDON = """
from torch import nn
plain = nn.Linear.forward
nn.Linear.forward = lambda self, x: 2 * plain(self, x)
from poseidon.torch.model.factors import computes_plainly
assert not computes_plainly(nn.Linear(3, 2))
"""


def test_a_forward_that_was_replaced_before_poseidon_was_imported_is_not_torchs() -> None:
    said = subprocess.run([sys.executable, "-c", BEFORE_POSEIDON], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr


# What a program puts around torch's linear function.


class Plain(nn.Parameter):
    """A class that leaves functions alone."""


class Tripled(nn.Parameter):
    """A class with a linear function of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                return func(args[0], args[1] * 3, *args[2:])
            return func(*args, **(kwargs or {}))


class TriplingMode(TorchFunctionMode):
    """Has every linear function tripled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is nn.functional.linear else result


class TriplingBelow(TorchDispatchMode):
    """The same below autograd, which knows nothing of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else result


@contextmanager
def linear_replaced() -> Iterator[None]:
    before = nn.functional.linear
    nn.functional.linear = lambda x, weight, bias=None: before(x, weight * 3, bias)
    try:
        yield
    finally:
        nn.functional.linear = before


AROUND: dict[str, tuple[type[nn.Parameter], Callable[[], AbstractContextManager[Any]], bool]] = {
    "replaced": (nn.Parameter, linear_replaced, False),
    "mode": (nn.Parameter, TriplingMode, False),
    "class": (Tripled, nullcontext, False),
    "nothing": (Plain, nullcontext, True),
    "device": (nn.Parameter, lambda: torch.device("cpu"), True),
    "below autograd": (nn.Parameter, TriplingBelow, True),
}


def with_something_around(name: str) -> str:
    kind, around, as_factors = AROUND[name]
    module = net()
    module[2].weight = kind(module[2].weight.detach())
    plain = copy.deepcopy(module)
    model = Model(module, scheme="sfb")
    inputs, targets = mlp_batch(0, 4 * poseidon.world_size())
    for each, rows in ((model, own_rows), (plain, lambda tensor: tensor)):
        with around():
            output = each(rows(inputs))
        nn.functional.mse_loss(output, rows(targets)).backward()
    assert_gradients_close(module, plain)
    assert sends_factors(model, "2.weight") == as_factors
    return digest(param.grad for param in module.parameters())


@pytest.mark.parametrize("name", list(AROUND))
def test_gradients_are_those_of_the_linear_function_that_ran(name: str) -> None:
    assert all_equal(workers.run(2, with_something_around, name))


class Watching(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def recomputed_without_the_mode() -> list[bool]:
    """A checkpoint compares what both passes save. Returns whether each step has sent factors."""
    module = net()
    model, sent = Model(module, scheme="sfb"), []
    inputs, targets = map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))
    inner = module[2].forward
    module[2].forward = partial(checkpoint, inner, use_reentrant=False)
    for around in (nullcontext(), Watching(), nullcontext()):
        model.zero_grad()
        with around:
            output = model(inputs)
        nn.functional.mse_loss(output, targets).backward()
        sent.append(sends_factors(model, "2.weight"))
    return sent


def test_a_checkpoint_runs_again_without_the_mode_of_its_forward_pass() -> None:
    assert workers.run(2, recomputed_without_the_mode) == [[True, False, True]] * 2


def weight_changed_before_backward() -> str:
    """torch allows it where the input needs no gradient, as in a first layer, and refuses it elsewhere."""
    model, plain = Model(net(), scheme="sfb"), net()
    inputs, targets = mlp_batch(0, 4 * poseidon.world_size())
    losses = []
    for each, rows in ((model, own_rows), (plain, lambda tensor: tensor)):
        losses.append(nn.functional.mse_loss(each(rows(inputs)), rows(targets)))
        with torch.no_grad():
            next(each.parameters()).mul_(3)
    for loss in losses:
        loss.backward()
    assert_gradients_close(model.module, plain)
    assert sends_factors(model)
    loss = model(own_rows(inputs)).sum()
    with torch.no_grad():
        model.module[2].weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return digest(param.grad for param in plain.parameters())


def test_a_first_layers_weight_may_change_before_backward() -> None:
    assert all_equal(workers.run(2, weight_changed_before_backward))
