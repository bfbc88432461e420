"""Backend "evenstep" does what Gloo does, and what Gloo cannot; see backend_conformance_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("backend_conformance_cases.py")


@pytest.mark.parametrize(
    "part", ["reductions", "premultiplied", "movements", "objects", "functional", "layouts", "limits"]
)
def test_as_the_reference_and_gloo(run_ranks: Callable[..., Any], part: str) -> None:
    run_ranks(CASES, 3, args=(part,))


@pytest.mark.parametrize(
    "part",
    [
        "premultiplied layouts",
        *(pytest.param(part, marks=pytest.mark.more) for part in ("reductions", "movements", "objects")),
    ],
)
def test_over_gloo(run_ranks: Callable[..., Any], part: str) -> None:
    run_ranks(CASES, 3, args=tuple(part.split()), env={"EVENSTEP_COMM_ENGINE": "gloo"})


def test_two_ranks_move_all(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 2, args=("movements",))
