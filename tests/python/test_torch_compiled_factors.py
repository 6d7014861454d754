"""Factors of Linear layers in compiled code: what torch.compile makes of a model trains as the model itself."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from poseidon.schemes import takes_factors
from torch_cases import all_equal, digest, mlp, mlp_batch, own_rows, parameters_digest

EAGER = "aot_eager"


class Net(nn.Module):
    """Torch compiles no container of its own by `compile()`, so this is one of the program's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def compiled(module: nn.Module, backend: str = EAGER, **options: Any) -> Any:
    torch._dynamo.reset()  # which compiles one function only so often in one process
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def sent(model: Any) -> list[str]:
    """What the last exchange of each weight was: its scheme, its bytes, and K if it took factors."""
    return sorted(
        f"{layer.name.removeprefix('_orig_mod.')} {layer.scheme} {layer.bytes_sent}"
        + (f" {layer.factor_count}" if takes_factors(layer.scheme) else "")
        for layer in model.synchronization_stats()
        if "weight" in layer.name
    )


def trained(wrapped: Any, steps: int = 3, scheme: str = "auto", rows: int = 2) -> list[Any]:
    """After each step what was sent and what became of the parameters."""
    model = poseidon.DistributedDataParallel(wrapped, scheme=scheme)
    return trained_by(model, model, steps, rows)


def trained_by(model: Any, call: Any, steps: int = 3, rows: int = 2) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = map(own_rows, mlp_batch(step, rows * poseidon.world_size()))
        nn.functional.mse_loss(call(inputs), targets).backward()
        found.append(digest(param.grad for param in model.parameters()))
        optimizer.step()
        found.append(sent(model))
    return [*found, parameters_digest(model)]


def as_eager(scheme: str) -> list[Any]:
    plainly = trained(Net(), scheme=scheme)
    assert sum(" sfb " in one for one in plainly[1]) >= 2
    assert trained(compiled(Net()), scheme=scheme) == plainly
    model = poseidon.DistributedDataParallel(Net(), scheme=scheme)
    compiled_inside(model.module)
    assert trained_by(model, model) == plainly
    model = poseidon.DistributedDataParallel(Net(), scheme=scheme)
    assert trained_by(model, torch.compile(model, backend=EAGER)) == plainly
    return plainly


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
def test_a_compiled_model_trains_with_the_bits_and_bytes_of_the_model_itself(scheme: str) -> None:
    assert all_equal(workers.run(2, as_eager, scheme))


def one_compiled_rank() -> list[Any]:
    plainly = trained(Net())
    assert trained(Net() if poseidon.rank() else compiled_inside(Net())) == plainly
    return plainly


def compiled_inside(module: nn.Module, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    module.compile(backend=EAGER, **{"fullgraph": True, **options})
    return module


def test_one_rank_alone_may_compile_its_model() -> None:
    assert all_equal(workers.run(2, one_compiled_rank))


class Uses(nn.Module):
    """A weight that is used as `how` says. What is compiled is `core`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.inner, self.last = nn.Linear(48, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 4)
        if how == "shared":
            self.again = nn.Linear(64, 64, bias=False)
            self.again.weight = self.inner.weight
        if how == "norm":
            nn.utils.parametrizations.weight_norm(self.inner)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        how, x = self.how, torch.tanh(self.first(x))
        if how == "twice":
            x = self.inner(torch.tanh(self.inner(x)))
        elif how == "alike":  # a compiler makes one of the two calls
            x = self.inner(x) + self.inner(x)
        elif how == "shared":
            x = self.again(torch.tanh(self.inner(x)))
        elif how == "penalty":
            x = self.inner(x) + self.inner.weight.square().mean()
        elif how == "transposed":
            x = nn.functional.linear(self.inner(x), self.inner.weight.t())
        elif how == "checkpoint":
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)
        elif how == "three dimensions":
            x = self.inner(x.reshape(2, -1, 64).transpose(0, 1)).transpose(0, 1).reshape(-1, 64)
        elif how == "break":
            x = self.inner(x)
            torch._dynamo.graph_break()
            x = self.inner(torch.tanh(x))
        elif how == "vmap":
            x = torch.func.vmap(self.inner)(x)
        else:
            x = self.inner(x)
        return self.last(torch.tanh(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(x)


def use(how: str) -> list[Any]:
    module = compiled_inside(Uses(how), fullgraph=how != "break")
    found, wanted = trained(module, 2, "sfb"), trained(Uses(how), 2, "sfb")
    assert [one for one in found if isinstance(one, list)] == [one for one in wanted if isinstance(one, list)]
    if how != "three dimensions":  # of which torch multiplies other matrices
        assert found == wanted
    return [found[-1]]  # servers do not send as much as workers


@pytest.mark.parametrize(
    "how",
    ["twice", "alike", "shared", "penalty", "transposed", "checkpoint", "three dimensions", "break", "vmap", "norm"],
)
def test_uses_of_a_weight_in_compiled_code(how: str) -> None:
    assert all_equal(workers.run(2, use, how))


# What a program does with a compiled model.


def gradients_of(call: Callable[[Any, Any, torch.Tensor], Any], compiles: bool, **options: Any) -> list[Any]:
    """What two of `call(model, module, inputs)` return, and the gradients after each."""
    module = Net()
    if compiles:
        compiled_inside(module)
    model = poseidon.DistributedDataParallel(module, **options)
    found: list[Any] = []
    for step in range(2):
        model.zero_grad()
        found.append(call(model, module, own_rows(mlp_batch(step, 4 * poseidon.world_size())[0])))
        found.append([None if param.grad is None else param.grad.clone() for param in module.parameters()])
    return found


def several_backwards(model: Any, module: Any, inputs: torch.Tensor) -> None:
    with model.no_sync():
        model(inputs).sum().backward()
        model(inputs[:2]).sum().backward()
    (model(inputs).square().sum() + model(inputs.flip(0)).sum()).backward()


def evaluated_between(model: Any, module: Any, inputs: torch.Tensor) -> list[torch.Tensor]:
    output = model(inputs)
    with torch.no_grad():
        seen = model(2 * inputs)
    past = module(inputs)
    output.sum().backward()
    past.square().sum().backward(inputs=[module.net[4].bias])
    return [seen, past.detach()]


def past_the_wrapper(model: Any, module: Any, inputs: torch.Tensor) -> None:
    module(inputs).sum().backward()


def asked_for(model: Any, module: Any, inputs: torch.Tensor) -> list[torch.Tensor]:
    params = list(module.parameters())
    seen = torch.autograd.grad(model(inputs).sum(), params)
    model(inputs).sum().backward()
    return list(seen)


def differentiable(model: Any, module: Any, inputs: torch.Tensor) -> list[torch.Tensor]:
    seen = torch.autograd.grad(model(inputs).sum(), [*module.parameters()], create_graph=True)
    return [one.detach() for one in seen]


def repeated(model: Any, module: Any, inputs: torch.Tensor) -> None:
    output = model(inputs).sum()
    with model.no_sync():
        output.backward(retain_graph=True)
    model(inputs).mean().backward()


def hooked(model: Any, module: Any, inputs: torch.Tensor) -> list[Any]:
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []  # whose turn it is depends on the compiler
    handles = [
        module.net[0].weight.register_hook(lambda grad: first.append(grad.clone())),
        module.net[2].weight.register_post_accumulate_grad_hook(lambda param: second.append(param.grad.clone())),
    ]
    model(inputs).sum().backward()
    for handle in handles:
        handle.remove()
    return first + second


def with_autocast(model: Any, module: Any, inputs: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(inputs)
    output.float().square().sum().backward()


def saved_elsewhere(model: Any, module: Any, inputs: torch.Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        output = model(inputs)
    output.sum().backward()


def recomputed_around(model: Any, module: Any, inputs: torch.Tensor) -> None:
    block = model.module
    model.forward(inputs).sum().backward()
    checkpoint(block, inputs, use_reentrant=False).sum().backward()


CALLS = (
    several_backwards,
    evaluated_between,
    past_the_wrapper,
    asked_for,
    differentiable,
    repeated,
    hooked,
    with_autocast,
    saved_elsewhere,
    recomputed_around,
)


def as_called(call: Callable[..., Any]) -> None:
    for scheme in ("auto", "sfb"):
        with torch._functorch.config.patch(donated_buffer=False):  # for several backward passes of one forward
            found = [gradients_of(call, compiles, scheme=scheme) for compiles in (True, False)]
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_model_does_what_the_model_itself_does(call: Callable[..., Any]) -> None:
    workers.run(2, as_called, call)


def twice_differentiated() -> str:
    model = poseidon.DistributedDataParallel(compiled_inside(Net()), scheme="sfb")
    inputs = own_rows(mlp_batch(0, 8)[0])
    gradients = torch.autograd.grad(model(inputs).square().sum(), [model.module.net[0].weight], create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not currently support double backward|cannot be differentiated"):
        gradients[0].square().sum().backward()
    return "refused"


def test_a_gradient_of_compiled_code_is_not_differentiated_again() -> None:
    workers.run(2, twice_differentiated)


class Lost(nn.Module):
    """Compiled code that is played again without what it does besides computing, as a CUDA graph is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(48, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def lost() -> str:
    model = poseidon.DistributedDataParallel(compiled_inside(Lost()), scheme="sfb")
    inputs = own_rows(mlp_batch(0, 8)[0])
    model(inputs).sum().backward()
    gate = vars(model.module.inner.weight)["_factor_gate"].tensor
    output = model(inputs).sum() + gate.sum()
    with pytest.raises(poseidon.PoseidonError, match=r"inner\.weight without handing over all of its gradient"):
        output.backward()
    return "told"


def test_rows_that_compiled_code_loses_are_missed() -> None:
    workers.run(2, lost)


def changing() -> list[Any]:
    """Batches of several sizes, and an optimizer that overlaps."""
    results = []
    for overlap in (False, True):
        found = []
        for compiles in (True, False):
            module = Net()
            if compiles:
                compiled_inside(module, dynamic=True)
            model = poseidon.DistributedDataParallel(module)
            optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
            if overlap:
                optimizer = poseidon.DistributedOptimizer(optimizer, model)
            schemes = []
            for step, rows in enumerate((2, 4, 3, 3)):
                optimizer.zero_grad()
                inputs, targets = map(own_rows, mlp_batch(step, rows * poseidon.world_size()))
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                schemes.append(sent(model))
            found.append([*schemes, parameters_digest(module)])
        assert found[0] == found[1], f"overlap {overlap}: {found}"
        results.append(found[0][-1])
    return results


def test_batches_of_several_sizes() -> None:
    assert all_equal(workers.run(2, changing))


def by_inductor() -> list[Any]:
    plainly, found = trained(Net(), 2), trained(compiled(Net(), backend="inductor"), 2)
    assert [one for one in found if isinstance(one, list)] == [one for one in plainly if isinstance(one, list)]
    return found


def test_inductor_hands_over_factors() -> None:
    # Both processes wait for a C++ compiler, on busy cores for more than a minute.
    crew = workers.Crew(workers.TORCH, timeout_s=240.0, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
    try:
        assert all_equal(crew.run(2, by_inductor))
    finally:
        crew.close()


def saved() -> bool:
    model = poseidon.DistributedDataParallel(compiled_inside(Net()), scheme="sfb")
    model(own_rows(mlp_batch(0, 8)[0])).sum().backward()
    file = io.BytesIO()
    torch.save(model.module.state_dict(keep_vars=True), file)
    file.seek(0)
    assert b"poseidon" not in file.getvalue()
    again = torch.load(file, weights_only=True)
    assert torch.equal(again["net.0.weight"], model.module.net[0].weight)
    exported = torch.export.export(model.module.net, (torch.ones(3, 48),), strict=True)
    return "poseidon" in str(exported.graph)


def test_what_is_saved_or_exported_needs_no_poseidon() -> None:
    assert workers.run(2, saved) == [False, False]
