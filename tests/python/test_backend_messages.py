"""Point-to-point calls of torch on backend "evenstep"; what the ranks do stands in backend_message_cases.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("backend_message_cases.py")


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("every_dtype", 2), ("tags_and_any", 4), ("layouts", 2), ("batches", 2), ("batches", 3), ("overlap", 2)],
)
def test_messages(run_ranks: Callable[..., Any], case: str, ranks: int) -> None:
    run_ranks(CASES, ranks, args=(case,))


def test_messages_that_fail(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("failures",))


def test_dead_peer(run_ranks: Callable[..., Any]) -> None:
    first, second, third = run_ranks(CASES, 3, args=("death",), check=False)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 0, first.stderr
    assert third.returncode == 0, third.stderr
