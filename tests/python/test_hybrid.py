"""One all-reduce over devices of two makers, with a second group of CPUs in the other maker's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

CASES = Path(__file__).with_name("hybrid_cases.py")


@pytest.mark.parametrize("makers", ["a,b", "a,b,a,a"])
def test_sums_over_makers(run_ranks: Callable[..., Any], makers: str) -> None:
    run_ranks(CASES, makers.count(",") + 1, args=(makers,), timeout=120)
