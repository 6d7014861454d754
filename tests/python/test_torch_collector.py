"""Python's garbage collector pauses while a model is wrapped, and only then."""

from __future__ import annotations

import gc

import pytest
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from poseidon.torch.model.collector import collector_paused

COUNT = 2000


def collections_of_wrapping() -> tuple[int, bool]:
    poseidon.init()
    module = nn.ParameterList(nn.Parameter(nn.Linear(1, 1).bias.detach()) for _ in range(COUNT))
    found = []
    gc.callbacks.append(lambda phase, _: found.append(phase))
    before = gc.get_threshold()
    gc.set_threshold(100, 10, 10)
    try:
        poseidon.DistributedDataParallel(module)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    return found.count("start"), gc.isenabled()


def test_wrapping_seldom_collects() -> None:
    for count, enabled in workers.run_fresh(2, collections_of_wrapping):
        assert count < COUNT / 20
        assert enabled


def test_the_collector_goes_on_after_an_error() -> None:
    @collector_paused()
    def fails() -> None:
        assert not gc.isenabled()
        raise InvalidArgument("on purpose")

    with pytest.raises(InvalidArgument, match="on purpose"):
        fails()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
