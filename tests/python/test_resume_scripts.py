"""Scripts that keep iterators, have no prepared loader, leave loops out or keep counts of their own: resumed, they go on
where they were, or say why not."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

HEAD = """
import os, sys
if sys.argv[1] == "alone":  # as `python train.py`
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

torch.manual_seed(3)
data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, shuffle=True)

def say(*words):
    if es.is_main():
        print("SEEN", *words, flush=True)

def step(where, x, y):
    say(es.step(), where, es.session().latest.checksum)
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def seen(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith("SEEN")]


DRAWS = (
    HEAD
    + """
model, optimizer = es.prepare(model, optimizer)
if sys.argv[2] == "load":
    es.load_checkpoint("last")
for _ in range(int(sys.argv[3])):
    x = torch.randn(5, 4, dtype=torch.float64)
    say(es.step(), x.sum().item())
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
es.checkpoint("last")
"""
)


@pytest.mark.parametrize("where", ["job", "alone"])
def test_without_a_loader_each_checkpoint_has_the_generators_of_its_own_step(
    run_ranks: Callable[..., list[Any]], where: str
) -> None:
    ranks = 1 if where == "alone" else 2
    whole = seen(run_ranks(DRAWS, ranks, args=(where, "begin", "6")))
    parts = [seen(run_ranks(DRAWS, ranks, args=(where, kind, "2"))) for kind in ("begin", "load", "load")]
    assert [line for part in parts for line in part] == whole


HELD = (
    HEAD
    + """
kind, stop = sys.argv[1], int(sys.argv[2])
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
scheduler = es.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
kept = iter(loader)
next(kept)  # a look at the data; the iterator stays alive
if stop < 0:
    es.load_checkpoint("last")
for epoch in es.epochs(3) if kind == "epochs" else range(3):
    for x, y in loader:
        if es.step() == stop:
            es.checkpoint("last")
            sys.exit(0)
        step(optimizer.param_groups[0]["lr"], x, y)
        kept = None if es.step() == 7 else kept  # let go while another iteration is under way
    scheduler.step()
"""
)


@pytest.mark.parametrize("kind", ["epochs", "range"])
def test_a_look_whose_iterator_is_kept_does_not_count_as_training(
    run_ranks: Callable[..., list[Any]], kind: str
) -> None:
    whole = seen(run_ranks(HELD, args=(kind, "99")))
    assert len(whole) == 12
    # the stop comes in the third epoch, after a batch of it was fetched
    run_ranks(HELD, args=(kind, "9"))
    assert seen(run_ranks(HELD, args=(kind, "-1"))) == expected(whole)


def expected(whole: list[str]) -> list[str]:
    """The batch that was fetched before the checkpoint is not trained: one step less."""
    return [f"SEEN {int(line.split()[1]) - 1} {' '.join(line.split()[2:])}" for line in whole[10:]]


AGAIN = (
    HEAD
    + """
kind = sys.argv[1]
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
if kind == "kept":
    kept = iter(loader)
    for number in range(3):
        step("first", *next(kept))
        if number == 1:
            es.checkpoint("best")
    es.load_checkpoint("best")
    for x, y in loader:
        step("again", x, y)
elif kind == "first":
    for number, (x, y) in enumerate(loader):
        step("first", x, y)
        if number == 1:
            es.checkpoint("best")
elif kind == "in the loop":
    for number, (x, y) in enumerate(loader):
        if number == 0:
            es.load_checkpoint("best")
            continue
        step("again", x, y)
elif kind == "end":
    for epoch in range(3):
        for x, y in loader:
            step(epoch, x, y)
            if es.step() == 4:
                es.checkpoint("full")  # after the epoch's last batch
        if epoch == 1:
            es.load_checkpoint("full")
"""
)


def test_a_checkpoint_loaded_while_an_iterator_is_kept_moves_the_data(run_ranks: Callable[..., list[Any]]) -> None:
    """Also where a loop loads it at its first batch."""
    lines = seen(run_ranks(AGAIN, args=("kept",)))
    assert lines[2] == "SEEN 2 first " + lines[3].split()[3]  # the same batch, once more
    assert [line.split()[1:3] for line in lines[3:]] == [["2", "again"], ["3", "again"]]
    run_ranks(AGAIN, args=("first",))
    assert seen(run_ranks(AGAIN, args=("in the loop",))) == lines[3:]


def test_after_an_epochs_last_batch_the_next_iteration_has_batches(run_ranks: Callable[..., list[Any]]) -> None:
    lines = [line.split() for line in seen(run_ranks(AGAIN, args=("end",)))]
    assert [words[1:3] for words in lines[8:]] == [[str(n), "2"] for n in range(4, 8)]
    assert [words[3] for words in lines[8:]] == [words[3] for words in lines[4:8]]


LOOPS = (
    HEAD
    + """
first, stop = int(sys.argv[1]), int(sys.argv[2])
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
for count in ([first] if first else []) + [3]:
    for epoch in es.epochs(count):
        for x, y in loader:
            step(epoch, x, y)
        if es.step() == stop:
            es.checkpoint("last")
            raise SystemExit(0)
"""
)


def test_an_epochs_loop_that_does_not_come_again_is_not_passed_over_in_silence(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    run_ranks(LOOPS, args=("1", "8"))
    resume = {"EVENSTEP_RESUME": str(tmp_path / "last")}
    results = run_ranks(LOOPS, args=("0", "-1"), env=resume, check=False)
    assert [result.returncode for result in results] == [1, 1] and not seen(results)
    assert "es.epochs loop 1 of the script has 3 epochs, that of the checkpoint's had 1" in results[0].stderr
    # as many epochs: nothing tells it apart from the one that was over, but its end does
    run_ranks(LOOPS, args=("3", "16"))
    results = run_ranks(LOOPS, args=("0", "-1"), env=resume)
    said = "the script ended before es.epochs loop 2, in which its checkpoint was written: nothing was trained"
    assert [result.stderr.count(said) for result in results] == [1, 0]
    results = run_ranks(LOOPS, args=("3", "-1"), env=resume)
    assert len(seen(results)) == 8 and said not in results[0].stderr


COUNTER = (
    HEAD
    + """
class Early:
    count = 0
    def step(self):
        self.count += 1
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

stop, early = int(sys.argv[2]), Early()
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
es.prepare(early)
if sys.argv[1] == "load":
    es.load_checkpoint("last")
for epoch in range(4):
    for x, y in loader:
        step(early.count, x, y)
        if es.step() == stop:
            es.checkpoint("last")
            sys.exit(0)
    early.step()
"""
)


@pytest.mark.parametrize("by", ["launcher", "load"])
def test_what_a_replayed_loop_changes_is_put_back(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, by: str
) -> None:
    whole = seen(run_ranks(COUNTER, args=("begin", "-1")))
    run_ranks(COUNTER, args=("begin", "10"))
    resume = {"EVENSTEP_RESUME": str(tmp_path / "last")} if by == "launcher" else {}
    assert seen(run_ranks(COUNTER, args=(by, "-1"), env=resume)) == whole[10:]
