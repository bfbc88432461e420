"""What other people's scripts do: a loader made anew in each epoch, and a loss of the samples against one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REBUILT = """
import torch
from torch import nn
from torch.utils.data import DataLoader
import evenstep as es

torch.manual_seed(0)
model = nn.Linear(1, 1)
model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

def order(**options):
    loader = es.prepare(DataLoader(torch.arange(64.0)[:, None], batch_size=16, shuffle=True, **options))
    return tuple(x for batch in loader for x in es.gather(batch).reshape(-1).tolist())

common = torch.Generator().manual_seed(3)
first = order(generator=common)
assert first == order(generator=torch.Generator().manual_seed(3))  # in pairs, as torch gives them
assert first != order(generator=common)
assert len({order() for _ in range(4)}) == 4
assert all(len(set(one)) == 64 for one in (first, order()))
"""

AMONG = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.set_default_dtype(torch.float64)

def of_all(z):
    everything = es.gather(z.detach())
    mine = es.gather(torch.full((len(z),), es.rank())) == es.rank()
    everything[mine] = z
    return everything

def loss_of(a, b):
    rows = F.normalize(torch.cat([a, b]))
    scores = (rows @ rows.T).masked_fill(torch.eye(len(rows), dtype=torch.bool), -9e15) / 0.5
    return F.cross_entropy(scores, torch.arange(len(rows)).roll(len(a)))

def train(prepared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    if prepared:
        shares = lambda number, batch: [batch - 2 - number % 3, 2 + number % 3]
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares)
    for _ in range(2):
        for (x,) in loader:
            a, b = model(x), model(x * 1.1)
            weight = 1.0
            if prepared:
                n = len(a)
                a, b = of_all(a), of_all(b)
                weight = len(a) / n
            optimizer.zero_grad()
            (weight * loss_of(a, b)).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

alone = train(False)
together = train(True)
assert (alone - together).norm() < 1e-12 * alone.norm(), (alone, together)
"""


def test_a_loader_made_anew_has_an_order_of_its_own(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(REBUILT)


def test_samples_against_one_another_as_documented(run_ranks: Callable[..., list[Any]]) -> None:
    runs = run_ranks(AMONG)
    assert all("UserWarning" not in run.stderr for run in runs), [run.stderr for run in runs]


SEEDED = (
    REBUILT.partition("common =")[0]
    + """
orders = [order(generator=torch.Generator().manual_seed(seed)) for seed in (0, 1, 2, 1)]
assert len(set(orders)) == 3 and orders[1] == orders[3]
pair = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
orders = [order(generator=one) for one in (*pair, *pair)]
assert len(set(orders)) == 4
"""
)


def test_generators_seeded_otherwise_give_other_orders_under_one_seed(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(SEEDED, env={"EVENSTEP_SEED": "5"})
