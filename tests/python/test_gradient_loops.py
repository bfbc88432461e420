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


def test_gradients_set_by_hand_are_refused_until_they_are_exchanged(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Linear(2, 1)
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def set_gradients():
        for p, gradient in zip(model.parameters(), torch.autograd.grad(model(torch.ones(3, 2)).mean(), model.parameters())):
            p.grad = gradient * (es.rank() + 1)

    def refused():
        try:
            optimizer.step()
        except es.EvenstepError as error:
            return "parameter 'weight' of model 'model'" in str(error) and "es.exchange_gradients()" in str(error)

    set_gradients()
    assert refused()
    es.exchange_gradients()
    assert model.weight.grad.tolist() == [[1.5, 1.5]], model.weight.grad
    optimizer.step()
    optimizer.step()  # once more with the same: whole already
    set_gradients()
    assert refused()
    optimizer.zero_grad()
    optimizer.step()
    model(torch.ones(3, 2)).mean().backward()
    model.weight.grad = model.weight.grad.sign()  # gradients that backward made, changed
    optimizer.step()
    """
    run_ranks(code)


def test_an_optimizer_that_was_not_prepared_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = es.prepare(nn.Linear(2, 1))
    forgotten = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 2)).mean().backward()
        forgotten.step()
    prepared = es.prepare(torch.optim.AdamW(model.parameters()))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)  # as SAM's inside it
    inner.step()
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()
    """
    for result in run_ranks(code):
        assert result.stderr.count("was not given to es.prepare") == 1
        assert "the SGD was not given to es.prepare, so its steps do not count" in result.stderr
