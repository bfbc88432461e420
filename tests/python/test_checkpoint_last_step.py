"""A checkpoint that is due at a script's last step is written, and is that of the step."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

loop, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(3)
data = TensorDataset(torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])

def step(batch):
    x = batch[0] + 0.1 * torch.randn(1, dtype=torch.float64)
    ((model(x) - batch[1]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def values():
    return [v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()]

if loop == "counted":
    batches = iter(loader)
    while es.step() < last:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            continue
        step(batch)
elif loop == "epochs":
    for epoch in es.epochs(2):
        for i, batch in enumerate(loader):
            step(batch)
            if i == 6:
                break
else:
    for epoch in range(3):
        for batch in loader:
            step(batch)
            if es.step() == last:
                if loop == "error":
                    raise RuntimeError("on purpose")
                if loop == "averaged":
                    for p in model.parameters():
                        p.data.mul_(0.5)
                if loop == "saved":
                    es.checkpoint(extra={"by": "the script"})
                sys.exit(0)
if es.is_main():
    print("END", es.step(), *values())
"""


def end_of(results: list[Any]) -> str:
    return next(line for line in results[0].stdout.splitlines() if line.startswith("END"))


def written(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_it_is_written_and_goes_on_as_if_never_stopped(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    """Also where the script ends in the middle of an epoch."""
    whole = end_of(run_ranks(SCRIPT, args=("exit", "-1")))
    folder = tmp_path / "checkpoints"
    cadence = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "7"}
    run_ranks(SCRIPT, args=("exit", "14"), env=cadence)
    assert written(folder) == [7, 14]
    resume = {"EVENSTEP_RESUME": str(folder / "step-00000014")}
    assert end_of(run_ranks(SCRIPT, args=("exit", "-1"), env=resume)) == whole


@pytest.mark.parametrize(
    ("loop", "steps"),
    [
        ("counted", [7, 14]),
        ("epochs", [7, 14]),  # a break in the last epoch
        ("saved", [7, 14]),
        ("averaged", [7]),  # no longer the parameters of that step
        ("error", [7]),
    ],
)
def test_it_is_that_step_or_none(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, loop: str, steps: list[int]
) -> None:
    folder = tmp_path / "checkpoints"
    cadence = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "7"}
    run_ranks(SCRIPT, args=(loop, "14"), env=cadence, check=loop != "error")
    assert written(folder) == steps
    if loop == "saved":
        assert "by" in (folder / "step-00000014" / "manifest.json").read_text()
