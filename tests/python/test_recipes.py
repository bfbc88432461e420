"""Training as scripts do it gives the parameters of one process (the recipes: recipe_cases.py)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parent / "recipe_cases.py"
LIMITS = {"autocast": 1e-3}  # of 16-bit activations; the others: rounding of 64 bits


def cases_of(results: list[Any]) -> dict[str, dict[str, Any]]:
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("RESULTS "))
    cases: dict[str, dict[str, Any]] = json.loads(line.removeprefix("RESULTS "))
    return cases


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.more)])
def test_same_parameters_as_one_process(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    cases = cases_of(run_ranks(SCRIPT, ranks=ranks))
    assert len(cases) == 11
    wrong = {
        name: case
        for name, case in cases.items()
        if not (case["difference"] <= LIMITS.get(name, 1e-12) and case["same_on_all_ranks"])
    }
    assert not wrong


@pytest.mark.more
@pytest.mark.timeout(1000)
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize(("script", "words"), [("recipe_cases.py", []), ("batch_norm_cases.py", ["float64"])])
def test_compiled_by_torchs_own_backend_as_one_process_that_compiles_nothing(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, script: str, words: list[str]
) -> None:
    """Shares of other sizes get other kernels: the first one its own, then one for any size."""
    kernels = tmp_path / "kernels"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(kernels), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    words = [*words, "inductor"]
    results = run_ranks(SCRIPT.with_name(script), args=words, env=environment, timeout=900, fresh=True)
    cases = cases_of(results)
    same = [case.get("same", case.get("same_on_all_ranks")) for case in cases.values()]
    assert same == [True, True] and all(case["difference"] <= 1e-12 for case in cases.values()), cases
    assert list(kernels.rglob("*.so"))  # it did compile
