"""Parameters after 24 steps (12 of other types and engines; 50 marked `more`) with changing unequal shares equal those of one process (the cases:
prepare_cases.py)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "prepare_cases.py"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize(
    ("ranks", "dtype", "engine", "steps"),
    [
        pytest.param(1, "float64", (), 50, marks=pytest.mark.more),
        pytest.param(2, "float64", (), 50, marks=pytest.mark.more),
        (3, "float64", (), 24),
        pytest.param(3, "float64", (), 50, marks=pytest.mark.more),
        (2, "float32", (), 12),
        (3, "float64", ("torch",), 12),
        pytest.param(2, "float32", (), 50, marks=pytest.mark.more),
        pytest.param(3, "float64", ("torch",), 50, marks=pytest.mark.more),
    ],
)
def test_same_parameters_as_one_process(
    run_ranks: Callable[..., list[Any]], ranks: int, dtype: str, engine: tuple[str, ...], steps: int
) -> None:
    words, env = ("all", dtype, *engine), {"STEPS": str(steps)}
    results = run_ranks(SCRIPT, ranks=ranks, args=words, env=env, fresh=dtype == "float32")
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert cases
    wrong = {
        name: case
        for name, case in cases.items()
        if not (case["difference"] <= TOLERANCE[dtype] and case["same_on_all_ranks"] and case["moved"] > 0.0002 * steps)
    }
    assert not wrong
