"""Training as scripts do it gives the parameters of one process (the recipes: recipe_cases.py)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "recipe_cases.py"
LIMITS = {"autocast": 1e-3}  # of 16-bit activations; the others: rounding of 64 bits


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.more), 3])
def test_same_parameters_as_one_process(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    results = run_ranks(SCRIPT, ranks=ranks, timeout=170)
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert len(cases) == 10
    wrong = {
        name: case
        for name, case in cases.items()
        if not (case["difference"] <= LIMITS.get(name, 1e-12) and case["same_on_all_ranks"])
    }
    assert not wrong
