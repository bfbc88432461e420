"""Scripts with several loops, and with checkpoints that they load on their way: each goes on where it was."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

HEAD = """
import sys
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(3)
data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first, second = (DataLoader(data, batch_size=5, shuffle=True) for _ in range(2))
shares = lambda number, batch: [batch - 2, 2]

def step(where, x, y):
    if es.is_main():
        print("SEEN", es.step(), where, es.session().latest.checksum, optimizer.param_groups[0]["lr"], flush=True)
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

LOOPS = (
    HEAD
    + """
stop = int(sys.argv[1])
inner = [lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3), lr_scheduler.StepLR(optimizer, 2, 0.7)]
outer = lr_scheduler.SequentialLR(optimizer, inner, [3])
es.prepare(model, optimizer, *inner, outer)
first, second = es.prepare(first, second, shares=shares)

def train(phase, loader):
    for x, y in loader:
        if es.step() == stop:
            raise SystemExit(0)
        step(phase, x, y)

for epoch in es.epochs(2):
    outer.step()
    train(f"head {epoch}", first)
next(iter(first))
outer.step()
if stop > 0:
    es.checkpoint("between")
for epoch in es.epochs(3):
    if stop > 0:
        es.checkpoint(f"before-{stop}")
    outer.step()
    for turn in es.epochs(2):
        train(f"all {epoch} {turn}", first)
    train(f"all {epoch} second", second)
if es.is_main():
    print("END", es.step(), *[v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()])
"""
)


def lines(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith(("SEEN", "END"))]


def test_goes_on_in_the_loop_that_was_under_way(run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path) -> None:
    whole = lines(run_ranks(LOOPS, args=("-1",)))
    assert len(whole) == 2 * 4 + 3 * 12 + 1
    folder = tmp_path / "checkpoints"
    run_ranks(LOOPS, args=("32",), env={"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "30"})
    # the third is written by the second, before it has gone on
    for name, steps, stop in (("between", 8, -1), ("checkpoints/step-00000030", 30, 31), ("before-31", 30, -1)):
        results = run_ranks(LOOPS, args=(str(stop),), env={"EVENSTEP_RESUME": str(tmp_path / name)})
        assert lines(results) == (whole[steps:] if stop < 0 else whole[steps:stop]), name
        passed = "es.epochs loop 1 of the script was over before the checkpoint; training goes on in loop 2"
        assert (passed in results[0].stderr) == (steps > 8)


LOADS = (
    HEAD
    + """
loop, stop = sys.argv[1], int(sys.argv[2])
scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
model, optimizer, scheduler, loader = es.prepare(model, optimizer, scheduler, first, shares=shares)
loaded = False
for epoch in es.epochs(6):
    if epoch == stop:
        raise SystemExit(0)
    for number, (x, y) in enumerate(loader):
        step(epoch, x, y)
        if loop != "between" and epoch == 1 and number == 1 and stop > 0:
            es.checkpoint("best")
        if loop != "between" and epoch == 3 and number == 0 and not loaded:
            loaded = True
            es.load_checkpoint("best")
            if loop == "break":
                break
    scheduler.step()
    if loop == "between" and epoch == 1:
        es.checkpoint("best")
    if loop == "between" and epoch == 3:
        es.load_checkpoint("best")
    if epoch == 4 and stop > 0:
        es.checkpoint("late")
"""
)


@pytest.mark.parametrize(
    ("loop", "steps", "epochs", "rates"),
    [
        # what comes after the load: 8 steps were made when "best" was written, 2 batches of epoch 1 in the middle
        ("between", [8, 9, 10, 11, 12, 13, 14, 15], [2, 2, 2, 2, 3, 3, 3, 3], [2, 2, 2, 2, 3, 3, 3, 3]),
        ("on", [6, 7, *range(8, 16)], [1, 1, 2, 2, 2, 2, 3, 3, 3, 3], [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
        ("break", [6, 7, 8, 9, 10, 11], [1, 1, 2, 2, 2, 2], [2, 2, 3, 3, 3, 3]),
    ],
)
def test_a_checkpoint_loaded_on_the_way(
    run_ranks: Callable[..., list[Any]],
    tmp_path: pathlib.Path,
    loop: str,
    steps: list[int],
    epochs: list[int],
    rates: list[int],
) -> None:
    whole = lines(run_ranks(LOADS, args=(loop, "99")))
    before = 16 if loop == "between" else 13
    seen = [line.split() for line in whole[before:]]
    assert [int(words[1]) for words in seen] == steps
    assert [float(words[4]) for words in seen] == [1e-2 * 0.5**n for n in rates]
    # the same batches as in the epochs that the checkpoint was followed by
    batches = {(n // 4, n % 4): line.split()[3] for n, line in enumerate(whole[:before])}
    places = [(epoch, 2 + n if epoch == 1 else (n - epochs.count(1)) % 4) for n, epoch in enumerate(epochs)]
    known = [(words[3], batches[place]) for words, place in zip(seen, places) if place in batches]
    assert len(known) > 4 and all(have == want for have, want in known)
    run_ranks(LOADS, args=(loop, "5"))
    resumed = run_ranks(LOADS, args=(loop, "-1"), env={"EVENSTEP_RESUME": str(tmp_path / "late")})
    assert lines(resumed) == [line for line in whole if line.split()[2] == "5"]
