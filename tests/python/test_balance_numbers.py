"""`bench/balance_numbers.py`: every number that is to be reached, with its verdict, and what was not measured."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def numbers(bench_module: Callable[[str], ModuleType]) -> ModuleType:
    return bench_module("balance_numbers")


def aim(what: str, figure: float | None, reached: bool, part: str = "real") -> dict[str, Any]:
    return {"what": what, "part": part, "figure": figure, "unit": "", "aim": "≥ 1", "reached": reached}


def test_what_the_bench_tells_is_found_by_its_words(numbers: ModuleType) -> None:
    """The words are the report's own: one that is worded otherwise would look as if it had not been measured."""
    from evenstep import bench_balance_report as report

    cases = ("1:1", "2:1", "4:1", "16:1", "4:4:1")
    row = {"policy": "auto", "of_bound": 0.97, "rates": [[3.0, 3.0]], "samples_per_second": 3.0}
    rows = [{**row, "case": case, "policy": policy} for case in cases for policy in ("auto", "ddp", "hand")]
    change = {"case": "slow", "policy": "auto", "steps_after_slowing": [2], "steps_after_recovery": [None]}
    noise = {"case": "2:1, noise", "policy": "auto", "lost": 0.02}
    cost = {"deciding_seconds": 1e-6, "vote_seconds": 1e-6}
    real = {"rows": rows, "changes": [change], "noise": [noise], "overhead": cost, "batch": 64}
    simulated = {"rows": [], "changes": [], "noise": [noise]}
    aims = report.aims({"quick": False, "real": real, "simulated": simulated})
    found = list(numbers.of_balance({"aims": aims[:4]}, {"aims": aims[4:]}))
    assert len({one.what for one in found}) == len(found) == len(numbers.REAL) + 1 and all(
        one.reached is not None for one in found
    )
    by_words = {one.what: one for one in found}
    assert by_words["slow: recovered, at 0.9 of the optimum"].figure == "never"
    assert (
        by_words["4:1: beside DDP, equal (1.000 to 1.000, 50 %) (the best split itself: 1.03)"].reached is False
        and by_words["4:1: beside DDP, by hand (1.000 to 1.000, 50 %)"].reached is True
    )
    assert by_words["2:1, noise: lost against the best fixed split (simulated)"].reached is False
    assert [one.reached for one in numbers.of_balance()] == [None] * len(numbers.REAL)


def test_all_are_in_one_table(
    numbers: ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = [
        {
            "model": "GPT",
            "dtype": "float32",
            "steps": 200,
            "difference": difference,
            "bound": 1e-5,
            "itself": 1e-7,
            "without_gradient": apart,
        }
        for difference, apart in ((1e-7, {}), (2e-5, {"bias": 1.0}))
    ]
    bitwise = {
        "histories": {"gpt": {"same": 19, "of": 20, "steps": 30}},
        "cost": {"cnn": {"block": 4, "over_plain": 0.1}},
    }
    balance = {"quick": True, "aims": [aim("4:1: beside DDP, equal", 2.9, True)]}
    words = []
    for name, figures in (("balance", balance), ("models", models), ("bitwise", bitwise)):
        (tmp_path / name).write_text(json.dumps(figures))
        words += [f"--{name}", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", ["balance_numbers.py", *words])
    numbers.main()
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert any("beside DDP, equal" in line and "2.9" in line and line.endswith(" reached") for line in lines)
    assert any("2.0e-05" in line and "NOT reached" in line and "1 without gradient apart" in line for line in lines)
    assert any("of 20 random histories of 30 steps" in line and "NOT reached" in line for line in lines)
    assert any("more time a step" in line and "10.0 %" in line and line.endswith(" reached") for line in lines)
    assert "a short look" in told and lines[-1].strip() == "3 reached, 2 not reached, 15 not measured"
