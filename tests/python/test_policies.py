"""Policies of a script's own, in a job."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(0)
model = nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4, dtype=torch.float64), torch.randn(64, 1, dtype=torch.float64))
views = []


def quarter(view: es.PolicyView) -> list[int]:
    views.append(view)
    slow = view.batch // 4 + (es.rank() if "differ" in sys.argv else 0)
    if "raise" in sys.argv and view.steps == 2:
        raise ZeroDivisionError("no time")
    return [view.batch - slow, slow]


model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=16), policy=quarter)
shares = []
for epoch in range(2):
    for x, y in loader:
        shares.append(list(es.session().latest.shares))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
assert shares == [[12, 4]] * 8, shares
assert len(x) == (12, 4)[es.rank()]
assert views[0].last is None and views[0].steps == 0 and views[0].proposed == [8, 8]
last = views[-1]
assert last.steps > 2 and [samples for samples, _ in last.last] == [12, 4], last
assert all(seconds > 0 for _, seconds in last.last) and last.seconds(0, 12) > 0
print(f"{[p.double().sum().item() for p in model.parameters()]}")
"""


def test_shares_are_those_of_the_policy(run_ranks: Callable[..., list[Any]]) -> None:
    out = [rank.stdout for rank in run_ranks(SCRIPT)]
    assert out[0] == out[1]


def test_ranks_that_split_a_batch_differently_are_told(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["differ"], check=False):
        assert rank.returncode != 0
        assert "or split them differently: rank 1 differs" in rank.stderr
        assert "a policy of your own must depend on what it is told alone" in rank.stderr


def test_a_policy_that_raises_ends_training_by_name(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["raise"], check=False):
        assert rank.returncode != 0
        told = r"the policy quarter \(\S+:\d+\) failed for a batch of 16 after 2 steps: ZeroDivisionError: no time"
        assert re.search(told, rank.stderr)
