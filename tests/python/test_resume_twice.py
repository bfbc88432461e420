"""Scripts that go on from an epoch's last batch, and are resumed once more later: each iteration is told for what it was."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es

loop, kind, stop = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(3)
data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64))
model = nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=5, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda n, b: [b - 2, 2])
epochs = es.epochs if loop == "epochs" else range

def step(batch):
    latest = es.session().latest
    if es.is_main():
        print("SEEN", es.step(), latest.epoch, latest.batch, flush=True)
    ((model(batch[0]) - batch[1]) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def end():
    if es.is_main():
        print("END", es.step(), *[v.hex() for p in model.parameters() for v in p.reshape(-1).tolist()])
"""

ENDS = (
    HEAD
    + """
for epoch in epochs(3):
    for batch in loader:
        if es.step() == stop:
            raise SystemExit(0)
        step(batch)
end()
"""
)


def lines(results: list[Any]) -> list[str]:
    return [line for line in results[0].stdout.splitlines() if line.startswith(("SEEN", "END"))]


@pytest.mark.parametrize("loop", ["range", "epochs"])
def test_resumed_at_an_epochs_end_and_once_more(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, loop: str
) -> None:
    folder = tmp_path / "checkpoints"
    environment = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "4"}
    whole = lines(run_ranks(ENDS, args=(loop, "", "-1")))
    run_ranks(ENDS, args=(loop, "", "5"), env=environment)
    first = {"EVENSTEP_RESUME": str(folder / "step-00000004")}
    run_ranks(ENDS, args=(loop, "", "9"), env={**environment, **first})
    second = {"EVENSTEP_RESUME": str(folder / "step-00000008")}
    assert lines(run_ranks(ENDS, args=(loop, "", "-1"), env=second)) == whole[8:]


BACK = (
    HEAD
    + """
back = False
for epoch in epochs(6):
    for number, batch in enumerate(loader):
        if kind == "in the loop" and epoch == 3 and number == 1 and not stop:
            es.load_checkpoint("full")
            back = True
            continue
        step(batch)
        if es.step() == 8 and not back and not stop:
            es.checkpoint("full")  # after epoch 1's last batch
        if es.step() == 11 and back:
            es.checkpoint("mid")
    if kind == "between" and epoch == 3 and not stop:
        es.load_checkpoint("full")
        back = True
end()
"""
)


@pytest.mark.parametrize("loop", ["range", "epochs"])
@pytest.mark.parametrize("kind", ["between", "in the loop"])
def test_resumed_after_a_load_of_an_epochs_end(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, loop: str, kind: str
) -> None:
    whole = lines(run_ranks(BACK, args=(loop, kind, "0")))
    assert [line.split()[1:] for line in whole[-9:-1]] == [[str(n), str(n // 4), str(n % 4)] for n in range(8, 16)]
    resume = {"EVENSTEP_RESUME": str(tmp_path / "mid")}
    assert lines(run_ranks(BACK, args=(loop, kind, "1"), env=resume)) == whole[-6:]


FIRST = (
    HEAD
    + """
for epoch in epochs(3):
    for batch in loader:
        if kind == "back" and es.step() == 0:
            es.load_checkpoint("full")  # before any step
            continue
        step(batch)
        if es.step() == (4 if kind == "begin" else 6):
            es.checkpoint("full" if kind == "begin" else "mid")
end()
"""
)


def test_resumed_after_a_load_of_an_epochs_end_before_any_step(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    whole = lines(run_ranks(FIRST, args=("range", "begin", "0")))
    assert lines(run_ranks(FIRST, args=("range", "back", "0"))) == whole[4:]
    resume = {"EVENSTEP_RESUME": str(tmp_path / "mid")}
    assert lines(run_ranks(FIRST, args=("range", "resume", "0"), env=resume)) == whole[6:]


LEFT = (
    HEAD
    + """
def train():
    for batch in loader:
        step(batch)
        if es.step() == 4:
            es.checkpoint("full")
if kind == "begin":
    train()
    train()
else:
    for batch in loader:
        es.load_checkpoint("full")
        step(batch)
        break
    train()
"""
)


def test_a_load_and_a_step_before_a_break_are_training(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(LEFT, args=("range", "begin", "0"))
    seen = lines(run_ranks(LEFT, args=("range", "left", "0")))
    assert seen[1:] == [f"SEEN {n + 5} 1 {n}" for n in range(4)], seen


CALLS = (
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

early = es.prepare(Early())
for epoch in epochs(4):
    for batch in loader:
        if es.is_main():
            print("SEEN", es.step(), early.count)
        step(batch)
    if kind == "after":
        early.step()
    es.checkpoint("last" if kind != "cadence" else None)
    if es.step() == stop:
        raise SystemExit(0)
    if kind != "after":
        early.step()
end()
"""
)


@pytest.mark.parametrize("kind", ["before", "after", "cadence"])
def test_what_the_script_does_after_its_checkpoint_of_an_epoch_is_done_once(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, kind: str
) -> None:
    folder = tmp_path / "checkpoints"
    cadence = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": "6"}
    whole = lines(run_ranks(CALLS, args=("range", kind, "8"), env=cadence))
    step, found = (6, folder / "step-00000006") if kind == "cadence" else (8, tmp_path / "last")
    resumed = lines(run_ranks(CALLS, args=("range", kind, "-1"), env={"EVENSTEP_RESUME": str(found)}))
    counts = [int(line.split()[2]) for line in whole + resumed if len(line.split()) == 3]
    assert counts == [n // 4 for n in (*range(8), *range(step, 16))], resumed
