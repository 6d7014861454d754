"""Trains a model of the user's on one batch of its own, as a script that `measure_script` can watch.

python -m poseidon.torch.measure_script RESULT.json .../measure_model.py module:object
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from poseidon.errors import InvalidArgument


def load(name: str) -> tuple[nn.Module, Any]:
    """The model and the batch that `module:object` names.

    The object is the two together, a function that returns them, or a module whose `example_input_array` is the batch.
    Raises InvalidArgument for what is none of these.
    """
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise InvalidArgument(f"{name} cannot be imported: {error}") from None
    except AttributeError:
        raise InvalidArgument(
            f"{name}: the module {module_name} has no {attribute!r}: give the name of a model or of a function"
        ) from None
    if callable(found) and not isinstance(found, nn.Module):
        found = found()
    if isinstance(found, nn.Module):
        found = found, getattr(found, "example_input_array", None)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module) or found[1] is None:
        raise InvalidArgument(
            f"{name} is no model with a batch: give a tuple (model, batch), a function that returns it, or a model "
            "with an example_input_array"
        )
    return found


def _run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """What of the output has a gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor | None:
    """The loss of the output's squares, which stands for any. None: the output has no gradient."""
    losses = [output.float().square().mean() for output in _tensors(_run(model, batch))]
    return torch.stack(losses).sum() if losses else None


def train(name: str) -> None:
    """Trains without an end: who measures ends it."""
    model, batch = load(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgument(f"{name} has no parameter that is trained: give a model with requires_grad")
    optimizer = torch.optim.SGD(trained, lr=0.0)
    while True:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if loss is None:
            raise InvalidArgument(f"the output of {name} has no gradient: give a model whose parameters need one")
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    try:
        train(sys.argv[1])
    except InvalidArgument as error:
        sys.exit(str(error))
