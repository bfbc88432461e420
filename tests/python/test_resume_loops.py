"""Loops that peek, that count steps, that break: resumed, they end as if they had never stopped."""

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

loop, stop = sys.argv[1], int(sys.argv[2])
torch.manual_seed(3)
data = TensorDataset(torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])

def step(batch):
    if es.step() == stop:
        raise SystemExit(0)
    if es.is_main():
        print("SEEN", es.step(), es.session().latest.checksum if es.session().latest else "-", flush=True)
    if es.is_main() and es.session().user_state:
        print("EXTRA", es.session().user_state["epoch"], flush=True)
    ((model(batch[0]) - batch[1]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

if loop.startswith("peek"):
    next(iter(loader))
    for epoch in es.epochs(3) if loop == "peek epochs" else range(3):
        for batch in loader:
            step(batch)
elif loop == "iterations":
    it = iter(loader)
    while es.step() < 40:
        try:
            batch = next(it)
        except StopIteration:
            it = iter(loader)
            batch = next(it)
        step(batch)
elif loop == "next of iter":
    while es.step() < 20:
        step(next(iter(loader)))
elif loop == "break":
    for epoch in range(4):
        for i, batch in enumerate(loader):
            step(batch)
            if i == 5:
                break
elif loop == "break, then checkpoint":
    for epoch in es.epochs(4):
        for i, batch in enumerate(loader):
            step(batch)
            if i == 5:
                break
        es.checkpoint(f"end-{epoch}")
elif loop == "checkpoint each epoch":
    es.checkpoint("begin")
    for epoch in range(4):
        for batch in loader:
            step(batch)
        es.checkpoint(f"end-{epoch}", extra={"epoch": epoch})
if es.is_main():
    print("END", es.step(), *[v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()])
"""


def lines(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith(("SEEN", "END"))]


@pytest.mark.parametrize(
    ("loop", "every", "stop", "folder"),
    [
        ("peek", 14, 16, "checkpoints/step-00000014"),
        ("peek epochs", 14, 16, "checkpoints/step-00000014"),
        ("iterations", 28, 30, "checkpoints/step-00000028"),
        ("iterations", 24, 26, "checkpoints/step-00000024"),
        ("next of iter", 14, 16, "checkpoints/step-00000014"),
        ("break", 6, 14, "checkpoints/step-00000012"),
        ("break, then checkpoint", 0, 14, "end-1"),
    ],
)
def test_goes_on_as_if_never_stopped(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, loop: str, every: int, stop: int, folder: str
) -> None:
    whole = lines(run_ranks(SCRIPT, args=(loop, "-1")))
    environment = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    cadence = {"EVENSTEP_CHECKPOINT_EVERY": str(every)} if every else {}
    run_ranks(SCRIPT, args=(loop, str(stop)), env={**environment, **cadence})
    step = every * (stop // every) if every else 12
    resumed = lines(run_ranks(SCRIPT, args=(loop, "-1"), env={"EVENSTEP_RESUME": str(tmp_path / folder)}))
    assert resumed == whole[step:]


def test_what_was_written_before_stays_as_it_was(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    cadence = {"EVENSTEP_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "EVENSTEP_CHECKPOINT_EVERY": "14"}
    run_ranks(SCRIPT, args=("checkpoint each epoch", "30"), env=cadence)
    written = {name: (tmp_path / name / "manifest.json").read_bytes() for name in ("begin", "end-0", "end-1")}
    resume = {"EVENSTEP_RESUME": str(tmp_path / "checkpoints/step-00000028")}
    results = run_ranks(SCRIPT, args=("checkpoint each epoch", "-1"), env=resume)
    for name, manifest in written.items():
        assert (tmp_path / name / "manifest.json").read_bytes() == manifest, name
    assert (tmp_path / "end-2").exists() and (tmp_path / "end-3").exists()
    assert [result.stderr.count("stays as it is") for result in results] == [1, 0]
    # nor is what such a call would have saved beside it taken for new
    extras = [line for line in results[0].stdout.splitlines() if line.startswith("EXTRA")]
    assert extras[0] == "EXTRA 1" and extras[-1] == "EXTRA 2"
