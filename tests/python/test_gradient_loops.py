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


def test_batches_of_unequal_parts_are_refused_in_one_backward(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    data = TensorDataset(torch.randn(48, 2))
    model = es.prepare(nn.Linear(2, 1))
    shares = [[6, 6], [3, 9], [3, 9]]
    loaders = [es.prepare(DataLoader(data, batch_size=12), shares=lambda n, b, s=s: s) for s in shares]
    for batches in zip(*loaders):
        sum(model(x).mean() for (x,) in batches).backward()
    """
    for result in run_ranks(code, check=False):
        assert "two batches came before one backward of which this rank has different parts" in result.stderr
        assert "fix: call backward for each batch before the next is fetched" in result.stderr
