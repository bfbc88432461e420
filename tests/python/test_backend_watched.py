"""What torch's profiler and CommDebugMode see of the backend's calls, and the hooks of DDP that are C++."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist

from evenstep import backend_watched
from evenstep.backend import EvenstepGroup

CASES = Path(__file__).with_name("backend_watched_cases.py")


def test_the_profiler_shows_each_call(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("profile",))


@pytest.mark.parametrize("part", ["modes", "hooks"])
def test_as_on_gloo(run_ranks: Callable[..., Any], part: str) -> None:
    """The same counts in CommDebugMode, and DDP's built-in hooks."""
    run_ranks(CASES, 2, args=(part,))


def test_callbacks_of_float16_may_wait(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("callbacks",), fresh=True)


def test_what_gloo_makes_beside_host_by_host_is_recorded_by_it_alone() -> None:
    by_hosts: Any = SimpleNamespace(_engine=object(), _comm=None, over_hosts_by_gloo="shared memory and Gloo")
    by_hosts._reducible = lambda tensor, op: EvenstepGroup._reducible(by_hosts, tensor, op)
    floats, words, options = torch.ones(3), torch.ones(3, dtype=torch.bool), dist.AllreduceOptions()
    for shown, tensor, gloos in (
        ("all_reduce", floats, False),
        ("all_reduce", torch.ones(3, dtype=torch.complex64), False),
        ("all_reduce", words, True),
        ("all_reduce", floats.to_sparse(), True),
        ("reduce_scatter", words, True),
        ("all_gather", words, False),
        ("broadcast", words, False),
        ("gather", floats, True),
    ):
        assert backend_watched._by_gloo(by_hosts, shown, [tensor], options) == gloos, (shown, tensor)
    by_hosts._engine = None
    assert backend_watched._by_gloo(by_hosts, "all_reduce", [floats], options)
    by_hosts._engine = by_hosts._comm = object()
    assert not backend_watched._by_gloo(by_hosts, "gather", [floats], options)
