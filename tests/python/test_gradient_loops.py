"""Loops that keep gradients, leave micro-batches empty or share parameters train as in one process (gradient_cases.py)."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "gradient_cases.py"


@pytest.mark.parametrize(("ranks", "engine"), [(2, "default"), (3, "default"), (2, "torch")])
def test_same_parameters_as_one_process(run_ranks: Callable[..., list[Any]], ranks: int, engine: str) -> None:
    results = run_ranks(SCRIPT, ranks=ranks, args=(engine,), timeout=170)
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases = json.loads(line.removeprefix("RESULTS "))
    assert cases
    wrong = {n: case for n, case in cases.items() if not (case["difference"] < 1e-12 and case["same_on_all_ranks"])}
    assert not wrong
