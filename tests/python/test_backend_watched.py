"""What torch's profiler and CommDebugMode see of the backend's calls, and the hooks of DDP that are C++."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
CASES = Path(__file__).with_name("backend_watched_cases.py")


def test_the_profiler_shows_each_call(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("profile",))


@pytest.mark.parametrize("part", ["modes", "hooks"])
def test_as_on_gloo(run_ranks: Callable[..., Any], part: str) -> None:
    """The same counts in CommDebugMode, and DDP's built-in hooks."""
    run_ranks(CASES, 2, args=(part,))


def test_callbacks_of_float16_may_wait(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("callbacks",), fresh=True)
