"""The time that a program gives torch.distributed is Poseidon's timeout, too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from poseidon.launch import free_port
from poseidon.torch.process import context as context_module
from poseidon.torch.process.context import context_of


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch.distributed with one rank, for which the program gave a time or not."""
    given = {} if request.param is None else {"timeout": timedelta(seconds=request.param)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1, **given)
    yield
    context_module._process.end()
    dist.destroy_process_group()


@pytest.mark.parametrize(("group", "expected"), [(77, 77.0), (None, 300.0)], indirect=["group"])
def test_the_programs_time_is_taken(group: None, expected: float) -> None:
    assert context_of().settings.timeout == expected


@pytest.mark.parametrize("group", [77], indirect=True)
def test_poseidons_own_option_comes_first(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_TIMEOUT", "55")
    assert context_of().settings.timeout == 55.0
