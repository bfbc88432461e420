"""Scripts that share nothing out are told so: ranks that draw the same batches, a prepared loader that is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

class Endless:
    def __init__(self):
        self.loader = DataLoader(data, batch_size=8)
        self.batches = iter(self.loader)

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3))
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
BEFORE
for _ in range(11):
    x = BATCH
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
PREPARE = "model, optimizer = es.prepare(model, optimizer)"
CASES = {
    "the same batches": (PREPARE, "torch.randn(8, 3)", "all ranks train on the same batches"),
    "other batches": (f"{PREPARE}; torch.manual_seed(es.rank())", "torch.randn(8, 3)", ""),
    "what was returned is not used": (
        "plain = DataLoader(data, batch_size=8, shuffle=True); es.prepare(model, optimizer, plain)",
        "next(iter(plain))[0]",
        "a DataLoader was prepared, but",
    ),
    "a prepared loader": (
        "model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=8)); batches = iter(loader)",
        "next(batches)[0]",
        "",
    ),
}

CLOSURE = SCRIPT.replace(
    """    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    """    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
""",
).replace("SGD(model.parameters(), lr=0.1)", "LBFGS(model.parameters(), lr=0.1, max_iter=4)")


@pytest.mark.parametrize("case", CASES)
def test_is_told_once(run_ranks: Callable[..., list[Any]], case: str) -> None:
    before, batch, words = CASES[case]
    runs = run_ranks(SCRIPT.replace("BEFORE", before).replace("BATCH", batch))
    said = [run.stderr for run in runs]
    if words:
        assert said[0].count(f"UserWarning: {words}") == 1, said[0]
    assert all("UserWarning" not in one for one in (said[1:] if words else said)), said


def test_a_closure_over_the_prepared_loader_is_not_told(run_ranks: Callable[..., list[Any]]) -> None:
    before, batch, _ = CASES["a prepared loader"]
    runs = run_ranks(CLOSURE.replace("BEFORE", before).replace("BATCH", batch))
    assert all("UserWarning" not in run.stderr for run in runs), [run.stderr for run in runs]


def test_what_holds_a_loader_is_refused_with_what_to_do(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(
        SCRIPT.replace("BATCH", "torch.randn(8, 3)").replace(
            "BEFORE",
            PREPARE
            + """
for one, words in ((Endless(), "in Endless, self.loader = es.prepare(self.loader)"), (Endless().batches, "give the DataLoader itself")):
    try:
        es.prepare(one)
    except TypeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
torch.manual_seed(es.rank())
""",
        )
    )
