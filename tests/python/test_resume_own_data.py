"""A resumed script that prepares no loader: what the exchange of gradients remembered comes back with the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCRIPT = """
import os, sys
import torch
from torch import nn
import evenstep as es

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
models = [nn.Linear(6, 4) for _ in range(3)]
es.prepare(models[0], compression="onebit")
es.prepare(models[1], sync=es.DiLoCo(every=2))
es.prepare(models[2], sync=es.Stale(steps=1))
optimizer = es.prepare(torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1))
while es.step() < 9:
    generator = torch.Generator().manual_seed(100 * es.step() + es.rank())
    x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)
    optimizer.zero_grad()
    sum((m(x) - y).square().mean() for m in models).backward()
    optimizer.step()
    if es.step() == 5 and "EVENSTEP_RESUME" not in os.environ:
        es.checkpoint("fifth")
es.synchronise_models()
for model in models:
    print("END", es.step(), *(v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()))
"""


def ends(results: list[Any]) -> list[list[str]]:
    return [[line for line in rank.stdout.splitlines() if line.startswith("END 9 ")] for rank in results]


def test_own_data_go_on_to_the_last_bit(run_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    whole = ends(run_ranks(SCRIPT))
    assert len(whole[0]) == 3 and whole[0] == whole[1]
    resumed = run_ranks(SCRIPT, env={"EVENSTEP_RESUME": str(tmp_path / "fifth")})
    assert ends(resumed) == whole
    assert "begins at zero" not in resumed[0].stderr and "change nothing" not in resumed[0].stderr
