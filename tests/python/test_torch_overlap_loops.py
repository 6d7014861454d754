"""Updates that wait for their gradients: whatever a training loop does, the bits are those of plain training."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import poseidon.torch as poseidon
import workers
from overlap_cases import Branches, assert_same_training, own_batch, plain_loop, train_step
from torch_cases import all_equal, mean_loss


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def fused(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01, fused=True)


def backward(model: Any, step: int, scale: float = 1.0) -> None:
    (scale * mean_loss(model, *own_batch(step))).backward()


# Each trains and returns what is to be the same without waiting.


def zero_in_place_early(model: Any, optimizer: Any) -> None:
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        optimizer.step()


def zero_in_place_at_once(model: Any, optimizer: Any) -> list[float]:
    for step in range(5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [param.grad.abs().sum().item() for param in model.parameters() if param.grad is not None]


def zero_late(model: Any, optimizer: Any) -> None:
    for step in range(5):
        loss = mean_loss(model, *own_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def zero_by_the_model(model: Any, optimizer: Any) -> None:
    for step in range(8):
        (model if step % 2 else model.module).zero_grad(set_to_none=step % 4 < 2)
        backward(model, step)
        optimizer.step()


def zero_never(model: Any, optimizer: Any) -> None:
    for step in range(5):
        backward(model, step)
        optimizer.step()


def zero_before_step(model: Any, optimizer: Any) -> None:
    for step in range(6):
        backward(model, step)
        if step % 3:
            optimizer.zero_grad(set_to_none=step % 3 == 1)
        optimizer.step()


def some_gradients_replaced(model: Any, optimizer: Any) -> None:
    params = list(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        params[step % 3].grad = None
        params[3].grad = torch.ones_like(params[3])
        optimizer.step()
        params[0].grad = torch.ones_like(params[0])


def accumulate(model: Any, optimizer: Any) -> None:
    for step in range(5):
        with model.no_sync():
            backward(model, 10 + step)
            backward(model, 20 + step)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def accumulate_exchanged(model: Any, optimizer: Any) -> None:
    for step in range(6):
        backward(model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def local_only(model: Any, optimizer: Any) -> list[float]:
    plain_loop(model, optimizer, 2)
    optimizer.zero_grad()
    with model.no_sync():
        backward(model, 5)
    optimizer.step()
    optimizer.zero_grad()
    own = [param.sum().item() for param in model.parameters()]
    for param in model.parameters():  # made the same again
        poseidon.broadcast(param.data)
    return own


def steps_without_backward(model: Any, optimizer: Any) -> list[float]:
    optimizer.step()
    losses = []
    for step in range(4):
        losses.append(train_step(model, optimizer, step))
        optimizer.step()  # the same gradients again
        optimizer.zero_grad()
        optimizer.step()
    return losses


def forward_twice(model: Any, optimizer: Any) -> None:
    for step in range(4):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step)) + mean_loss(model.module, *own_batch(step + 1))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def evaluate(model: Any, optimizer: Any) -> list[Any]:
    seen: list[Any] = []
    inputs = own_batch(50)[0]
    for step in range(6):
        train_step(model, optimizer, step)
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            seen.append((model if step % 3 else model.module)(inputs).tolist())
        model.train()
    seen.append(model.module(inputs).tolist())  # with gradients
    return seen


def inference_first(model: Any, optimizer: Any) -> list[Any]:
    """The optimizer's state comes to be while inference mode is on."""
    train_step(model, optimizer, 0)
    with torch.inference_mode():
        seen = model.module.eval()(own_batch(50)[0]).tolist()
    model.train()
    return [seen, plain_loop(model, optimizer, 3)]


def closures(model: Any, optimizer: Any) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(len(losses)))
        loss.backward()
        return loss

    losses: list[float] = []
    for _ in range(4):
        losses.append(optimizer.step(closure).item())
    return losses


def clipped(model: Any, optimizer: Any) -> list[float]:
    kept = list(model.module.parameters())
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        norms.append(clip_grad_norm_(model.parameters() if step % 2 else kept, 0.05).item())
        optimizer.step()
    return norms


def watched_gradients(model: Any, optimizer: Any) -> list[Any]:
    """Gradients are looked at and changed after backward, and looked at after step()."""
    kept = list(model.parameters())
    seen: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        seen.append([None if param.grad is None else param.grad.norm().item() for param in kept])
        with torch.no_grad():
            kept[0].grad[0] = 0.0
        optimizer.step()
        seen.append([None if param.grad is None else param.grad.sum().item() for param in kept[::-1]])
    return seen


def averaged(model: Any, optimizer: Any) -> list[Any]:
    averages = [copy.deepcopy(param.detach()) for param in model.parameters()]
    other = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(4):
        train_step(model, optimizer, step)
        with torch.no_grad():
            torch._foreach_lerp_(averages, list(model.parameters()), 0.1)
        other.update_parameters(model.module)
    return [tensor.tolist() for tensor in [*averages, *other.parameters()]]


def edited(model: Any, optimizer: Any) -> None:
    kept = list(model.module.parameters())
    for step in range(4):
        train_step(model, optimizer, step)
        with torch.no_grad():
            kept[step].clamp_(-0.05, 0.05)
            kept[-1].data.mul_(0.5)


def copied(model: Any, optimizer: Any) -> list[Any]:
    sums = []
    for step in range(4):
        train_step(model, optimizer, step)
        parts = [copy.deepcopy(model.module), through_file(model.module)]
        sums.append([param.sum().item() for part in parts for param in part.parameters()])
        assert {type(param) for part in parts for param in part.parameters()} == {nn.Parameter}
    return sums


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def saved_and_resumed(model: Any, optimizer: Any) -> list[Any]:
    losses = []
    for step in range(3):
        losses.append(train_step(model, optimizer, step))
        model_state = through_file((model if step % 2 else model.module).state_dict())
        optimizer_state = through_file(optimizer.state_dict())
        train_step(model, optimizer, 30 + step)  # forgotten again
        train_step(model, optimizer, 40 + step)
        (model if step % 2 else model.module).load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    return losses


def optimizer_state_read(model: Any, optimizer: Any) -> list[Any]:
    seen = []
    for step in range(3):
        train_step(model, optimizer, step)
        states = [optimizer.state[param] for param in model.parameters() if param in optimizer.state]
        seen.append([value.sum().item() for state in states for value in state.values() if value is not None])
    return seen


def frozen_for_a_while(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(6):
        for param in model.module.first.parameters():
            param.requires_grad_(step % 3 != 1)
        losses.append(train_step(model, optimizer, step))
    return losses


def left_out_for_a_while(model: Any, optimizer: Any) -> list[float]:
    """Parameters that their group has lost get gradients, which add up, and no updates. One moves to a new place."""
    group, losses = optimizer.param_groups[0], []
    everything = list(group["params"])
    for step in range(7):
        if step == 2:
            model.module.first.requires_grad_(False)
            group["params"] = [param for param in everything if param.requires_grad]
        if step == 3:
            model.module.first.requires_grad_(True)
        if step == 5:
            group["params"] = everything[1:] + everything[:1]
        losses.append(train_step(model, optimizer, step))
    return losses


def deleted(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(5):
        losses.append(mean_loss(model, *own_batch(step)).item())
        backward(model, step)
        optimizer.step()
        for param in list(model.parameters())[step % 2 :]:
            if step != 2:
                del param.grad
                assert param.grad is None
    return losses


def hooked(model: Any, optimizer: Any) -> list[str]:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    plain_loop(model, optimizer, 3)
    return calls


def given_to_others(model: Any, optimizer: Any) -> None:
    """Parameters of one shape are updated with each other's gradients."""
    one, other = model.module.twice.weight, model.module.borrowed.weight
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        if step % 2:
            one.grad, other.grad = other.grad, one.grad
        else:
            one.grad = other.grad
        optimizer.step()


def under_autocast(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_loss(model, *own_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_grad_scaler(model: Any, optimizer: Any) -> list[Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(7):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step)) * (float("inf") if step == 3 else 1.0)  # skipped by all ranks
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            seen.append(clip_grad_norm_(model.parameters(), 0.1).item() if step != 3 else None)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


LOOPS = [
    zero_in_place_early,
    zero_in_place_at_once,
    zero_late,
    zero_by_the_model,
    zero_never,
    zero_before_step,
    some_gradients_replaced,
    accumulate,
    accumulate_exchanged,
    local_only,
    steps_without_backward,
    forward_twice,
    evaluate,
    inference_first,
    closures,
    clipped,
    watched_gradients,
    averaged,
    edited,
    copied,
    saved_and_resumed,
    optimizer_state_read,
    frozen_for_a_while,
    left_out_for_a_while,
    deleted,
    hooked,
    given_to_others,
    under_autocast,
    with_grad_scaler,
]


def run_loop(loop: Any, scheme: str, update: str = "worker") -> str:
    makers = [momentum, adamw, *([fused] if loop in (with_grad_scaler, plain_loop) else [])]
    return " ".join(assert_same_training(loop, make, Branches, scheme=scheme, update=update) for make in makers)


@pytest.mark.parametrize("scheme", ["ps", "auto"])
@pytest.mark.parametrize("loop", LOOPS)
def test_same_bits(loop: Any, scheme: str) -> None:
    answers = workers.run(2, run_loop, loop, scheme)
    assert all_equal(answers)


ON_SERVERS = [
    zero_in_place_early,
    zero_in_place_at_once,
    zero_late,
    zero_by_the_model,
    zero_never,
    accumulate,
    evaluate,
    inference_first,
    closures,
    averaged,
    copied,
    saved_and_resumed,
    frozen_for_a_while,
    deleted,
    hooked,
    under_autocast,
]


@pytest.mark.parametrize("loop", ON_SERVERS)
def test_same_bits_with_updates_on_servers(loop: Any) -> None:
    assert all_equal(workers.run(2, run_loop, loop, "ps", "server"))


@pytest.mark.parametrize("loop", [zero_in_place_early, clipped, saved_and_resumed, with_grad_scaler, hooked])
def test_same_bits_with_one_worker(loop: Any) -> None:
    assert workers.run(1, run_loop, loop, "auto")[0]
