"""Parameters changed without a backward: ranks that train alone are told so, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(0)
model = nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=8)
model, loader = es.prepare(model, loader)

def loss_of(parameters, x):
    return torch.func.functional_call(model, parameters, (x,)).square().mean()

for _ in range(2):
    for (x,) in loader:
        STEP
"""
CASES = {
    "torch.func": (
        "for p, g in zip(model.parameters(), torch.func.grad(loss_of)(dict(model.named_parameters()), x).values()): p.data -= 0.1 * g",
        True,
    ),
    "autograd.grad": (
        "for p, g in zip(model.parameters(), torch.autograd.grad(model(x).square().mean(), model.parameters())): p.data = p.data - g",
        True,
    ),
    "a look": ("model(x).square().mean().item()", False),
    "backward": (
        """model.zero_grad(); model(x).square().mean().backward()
        for p in model.parameters(): p.data -= 0.1 * p.grad""",
        False,
    ),
    "exchanged": (
        """for p, g in zip(model.parameters(), torch.autograd.grad(model(x).square().mean(), model.parameters())): p.grad = g
        es.exchange_gradients()
        for p in model.parameters(): p.data -= 0.1 * p.grad""",
        False,
    ),
    "a collective of its own": (
        """for p, g in zip(model.parameters(), torch.autograd.grad(model(x).square().mean(), model.parameters())):
            p.data -= 0.1 * es.reduce_mean(g)""",
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_told_once(run_ranks: Callable[..., list[Any]], case: str) -> None:
    step, is_told = CASES[case]
    said = [run.stderr for run in run_ranks(SCRIPT.replace("STEP", step))]
    assert said[0].count("UserWarning: the parameters of a prepared model were changed") == is_told, said[0]
    assert "UserWarning" not in said[1]
