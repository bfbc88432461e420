"""Samples that cannot be read: an error, unless they are to be left out; then each is told, and the average is over the others."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from script_parts import EVENTS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep.unreadable import ReadableSamples

SCRIPT = (
    """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenstep as es
from evenstep import _core

how, bad = sys.argv[1], set(eval(sys.argv[2]))


class Data(Dataset):
    def __init__(self):
        torch.manual_seed(3)
        self.x, self.y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index in bad:
            raise OSError(5, f"block {index} is damaged")
        return self.x[index], self.y[index]


"""
    + EVENTS
    + """

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = es.session()
session.telemetry = Events(session.telemetry)
loader = DataLoader(Data(), batch_size=8, num_workers=2 if how == "workers" else 0)
asked = {} if how in ("environment", "not") else {"skip_unreadable": True}
if how == "trainer":
    trainer = es.Trainer(model, optimizer, lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
                         config=es.Config(policy="equal", **asked))
    trainer.fit(loader, epochs=2)
else:
    model, optimizer, loader = es.prepare(model, optimizer, loader, policy="equal", **asked)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
told = [one[1:] for one in session.telemetry.told if one[0] == _core.EVENT_SKIPPED]
print([p.tolist() for p in model.parameters()], told, sep=chr(10))
"""
)


def one_device(bad: set[int]) -> list[Any]:
    """The same in plain torch, on the samples that can be read."""
    torch.manual_seed(3)
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 1, dtype=torch.float64)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for first in range(0, 32, 8):
            good = [index for index in range(first, first + 8) if index not in bad]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[good]), y[good]).backward()
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


# Of batch 1 rank 1 has none that can be read.
BAD = {1, 12, 13, 14, 15, 22}


@pytest.mark.parametrize("how", ["call", "workers", "environment", "trainer"])
def test_the_average_is_over_what_could_be_read(run_ranks: Callable[..., list[Any]], how: str) -> None:
    env = {"EVENSTEP_SKIP_UNREADABLE": "1"} if how == "environment" else {}
    ranks = run_ranks(SCRIPT, args=[how, str(sorted(BAD))], env=env)
    wanted = one_device(BAD)
    told = []
    for rank in ranks:
        values, events = (ast.literal_eval(line) for line in rank.stdout.splitlines()[-2:])
        for mine, theirs in zip(values, wanted):
            assert torch.tensor(mine, dtype=torch.float64).flatten().tolist() == pytest.approx(
                torch.tensor(theirs, dtype=torch.float64).flatten().tolist(), rel=1e-12, abs=1e-14
            )
        told.append(events)
        assert rank.stderr.count("it is left out, as was asked for") == 1, rank.stderr
    # Each of a rank's own, once an epoch, with its index and the reason.
    assert [sorted(value for value, _ in events) for events in told] == [
        [1, 1],
        [12, 12, 13, 13, 14, 14, 15, 15, 22, 22],
    ]
    assert told[0][0][1].startswith("sample 1 cannot be read: OSError: [Errno 5] block 1 is damaged")


def test_it_is_an_error_where_nobody_asked(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = run_ranks(SCRIPT, args=["not", "[1]"], check=False)
    assert ranks[0].returncode != 0 and "block 1 is damaged" in ranks[0].stderr


def test_a_batch_of_which_nothing_can_be_read_is_an_error(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["call", str(list(range(8, 16)))], check=False):
        assert rank.returncode != 0
        assert "none of the 8 samples of batch 1 of epoch 0 can be read" in rank.stderr


def test_a_data_set_that_is_empty_is_said_to_be() -> None:
    samples = ReadableSamples([])
    with pytest.raises(es.EvenstepError, match="nor any of the first 64 of the data set: it has none"):
        samples.__getitems__([0])


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    with pytest.raises(TypeError, match="skip_unreadable=1"):
        es.prepare(model, optimizer, loader, skip_unreadable=1)  # type: ignore[arg-type]

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.ones(1)])

    with pytest.raises(es.EvenstepError, match="gives no further samples"):
        es.prepare(model, DataLoader(Stream(), batch_size=1), skip_unreadable=True)
    trainer = es.Trainer(
        model, optimizer, lambda m, b: m(b[0]).sum(), config=es.Config(exact="bitwise", skip_unreadable=True)
    )
    with pytest.raises(ValueError, match="would change the bits"):
        trainer.fit(loader)
