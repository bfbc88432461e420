"""Parameters after 50 steps with changing unequal shares equal those of one process (the cases: prepare_cases.py)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "prepare_cases.py"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize(
    ("ranks", "dtype", "engine"),
    [
        pytest.param(1, "float64", (), marks=pytest.mark.more),
        pytest.param(2, "float64", (), marks=pytest.mark.more),
        (3, "float64", ()),
        (2, "float32", ()),
        (3, "float64", ("torch",)),
    ],
)
def test_same_parameters_as_one_process(
    run_ranks: Callable[..., list[Any]], ranks: int, dtype: str, engine: tuple[str, ...]
) -> None:
    results = run_ranks(SCRIPT, ranks=ranks, args=("all", dtype, *engine), timeout=170, fresh=dtype == "float32")
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert cases
    wrong = {
        name: case
        for name, case in cases.items()
        if not (case["difference"] <= TOLERANCE[dtype] and case["same_on_all_ranks"] and case["moved"] > 0.01)
    }
    assert not wrong
