"""Training that stops and goes on, on another number of ranks too, ends with the parameters of one that did not stop."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import json, os, random, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

loop, stop_at, per_step = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "per_step"
ranks = int(os.environ["WORLD_SIZE"])

def shares(number, batch):
    draw = random.Random(number)
    cuts = sorted(draw.randint(0, batch) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, batch])]

torch.manual_seed(3)
data = TensorDataset(torch.randn(26, 4, dtype=torch.float64), torch.randn(26, 1, dtype=torch.float64))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader, scheduler = es.prepare(model, optimizer, loader, scheduler, shares=shares)
for epoch in es.epochs(4) if loop == "epochs" else range(4):
    for x, y in loader:
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if per_step:
            scheduler.step()
        if es.step() == stop_at:
            raise SystemExit(0)
    if not per_step:
        scheduler.step()
if es.is_main():
    rate = optimizer.param_groups[0]["lr"]
    values = torch.cat([p.reshape(-1) for p in model.parameters()]).tolist()
    print("END " + json.dumps([es.step(), rate, values]))
"""


def end_of(results: list[Any]) -> list[Any]:
    line = next(line for line in results[0].stdout.splitlines() if line.startswith("END "))
    end: list[Any] = json.loads(line.removeprefix("END "))
    return end


WHOLE: dict[str, list[Any]] = {}  # ends of the runs that did not stop; the same for every test


# 24 steps in 4 epochs of 6. The stop comes right after the step's own checkpoint is due at the next batch, so the
# checkpoint is that of the step before the stop: in an epoch's middle (8), and at its last batch (12).
@pytest.mark.parametrize(
    ("loop", "per_step", "every", "stop", "ranks"),
    [
        ("range", "per_epoch", 8, 10, 3),
        ("range", "per_epoch", 6, 13, 2),
        ("epochs", "per_epoch", 6, 13, 1),
        ("range", "per_step", 8, 10, 2),
    ],
)
def test_goes_on_as_if_never_stopped(
    run_ranks: Callable[..., list[Any]],
    tmp_path: pathlib.Path,
    loop: str,
    per_step: str,
    every: int,
    stop: int,
    ranks: int,
) -> None:
    if per_step not in WHOLE:
        WHOLE[per_step] = end_of(run_ranks(SCRIPT, ranks=2, args=("range", "-1", per_step)))
    whole = WHOLE[per_step]
    folder = tmp_path / "checkpoints"
    environment = {"EVENSTEP_CHECKPOINT_EVERY": str(every), "EVENSTEP_CHECKPOINT_DIR": str(folder)}
    run_ranks(SCRIPT, ranks=2, args=(loop, str(stop), per_step), env=environment)
    newest = sorted(folder.glob("step-*"))[-1]
    assert newest.name == f"step-{stop // every * every:08d}"
    resumed = end_of(run_ranks(SCRIPT, ranks=ranks, args=(loop, "-1", per_step), env={"EVENSTEP_RESUME": str(newest)}))
    assert resumed[:2] == whole[:2] == [24, pytest.approx(whole[1], rel=1e-12)]
    assert resumed[2] == pytest.approx(whole[2], rel=1e-9, abs=1e-12)
