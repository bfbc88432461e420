"""A rank of es.Trainer that runs out of memory makes its part of the batch in pieces: the step is the same, and later shares are
smaller where the others can take the rest. The memory really is short: RLIMIT_AS."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from script_parts import EVENTS

SCRIPT = (
    """
import os
import resource
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import _core

how = sys.argv[1]
amounts = "amounts" in sys.argv
rank = int(os.environ["RANK"])
MB = 1 << 20
# A sample takes 4 MB: forward of 16 needs twice 64 MB, backward one more.
room = {"forward": 100, "backward": 150, "both": 150, "single": 2, "norm": 150, "free": None, "micro": None}[how]
if how != "both" and rank == 0:
    room = None


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 2**19, dtype=torch.float64))
        self.head = nn.Parameter(torch.full((1, 1), 3.0, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(1).double() if how == "norm" else nn.Identity()

    def forward(self, x):
        wide = torch.tanh(x * self.weight)
        return self.norm(wide.mean(1, keepdim=True)) @ self.head


"""
    + EVENTS
    + """

def limit():
    size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + room * MB, resource.RLIM_INFINITY))


calls = []


def step(model, batch):
    if not calls and room is not None:
        limit()
    x, y = batch
    calls.append(len(x))
    loss = nn.functional.mse_loss(model(x), y)
    return (loss, 2.0 * len(x)) if amounts else loss


torch.manual_seed(3)
Wide()(torch.ones(2, 1, dtype=torch.float64)).mean().backward()  # what is made once
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(128, 1, dtype=torch.float64), torch.randn(128, 1, dtype=torch.float64))
session = es.session()
session.telemetry = Events(session.telemetry)
shares = []
trainer = es.Trainer(
    model, optimizer, step, on_step=lambda trainer: shares.append(list(session.latest.shares)), config=es.Config(policy="equal", micro_batch=5 if how == "micro" and rank else None)
)
loss = trainer.fit(DataLoader(data, batch_size=32))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
values = [model.weight.sum().item(), model.weight.square().sum().item(), model.head.item(), loss]
told = [one[1:] for one in session.telemetry.told if one[0] == _core.EVENT_MEMORY]
print(values, shares, calls, told, sep=chr(10))
"""
)


KNOWN: dict[tuple[str, ...], list[float]] = {}


def results(ranks: list[Any]) -> list[list[Any]]:
    return [[ast.literal_eval(line) for line in rank.stdout.splitlines()[-4:]] for rank in ranks]


def undisturbed(run_ranks: Callable[..., list[Any]], *words: str) -> list[float]:
    """What comes out with memory enough."""
    if words not in KNOWN:
        KNOWN[words] = results(run_ranks(SCRIPT, args=["free", *words]))[0][0]
    return KNOWN[words]


@pytest.mark.parametrize(
    "words",
    [
        ("backward",),
        pytest.param(("forward",), marks=pytest.mark.more),
        pytest.param(("backward", "amounts"), marks=pytest.mark.more),
        pytest.param(("forward", "amounts"), marks=pytest.mark.more),
    ],
)
def test_a_rank_that_runs_out_of_memory_makes_pieces_and_then_has_less(
    run_ranks: Callable[..., list[Any]], words: tuple[str, ...]
) -> None:
    whole = undisturbed(run_ranks, *words[1:])
    ranks = run_ranks(SCRIPT, args=list(words))
    found = results(ranks)
    values, shares, _, _ = found[0]
    assert found[1][:2] == found[0][:2]
    assert values == pytest.approx(whole, rel=1e-11)
    calls = found[1][2]
    assert calls[0] == 16 and calls[1] < 16 and sum(calls[1:]) >= 16, calls
    most = max(calls[1:])
    assert shares[0] == [16, 16] and shares[-1] == [32 - most, most], shares
    assert "ran out of memory with 16 samples, and goes on in pieces of" in ranks[1].stderr
    assert "ran out of memory" not in ranks[0].stderr
    assert any(words.startswith("rank 1 ran out of memory with 16 samples") for _, words in found[1][3])


def test_where_no_split_fits_all_go_on_in_pieces(run_ranks: Callable[..., list[Any]]) -> None:
    whole = undisturbed(run_ranks)
    found = results(run_ranks(SCRIPT, args=["both"]))
    assert found[0][0] == pytest.approx(whole, rel=1e-11)
    assert found[0][1] == [[16, 16]] * 4
    for _, _, calls, _ in found:
        assert calls[0] == 16 and max(calls[1:]) <= 8 and sum(calls[1:]) == 64, calls


def test_a_share_may_be_several_micro_batches(run_ranks: Callable[..., list[Any]]) -> None:
    """On one rank alone, which is the faster so."""
    whole = undisturbed(run_ranks)
    first, second = results(run_ranks(SCRIPT, args=["micro"]))
    assert first[0] == second[0] == pytest.approx(whole, rel=1e-11)
    assert first[1:] == [[[16, 16]] * 4, [16] * 4, []]
    assert second[1:] == [[[16, 16]] * 4, [5, 5, 5, 1] * 4, []]


@pytest.mark.parametrize(
    ("how", "said"), [("single", "ran out of memory with a single sample"), ("norm", "the model has BatchNorm")]
)
def test_what_cannot_be_mended_is_said(run_ranks: Callable[..., list[Any]], how: str, said: str) -> None:
    ranks = run_ranks(SCRIPT, args=[how], check=False)
    assert ranks[1].returncode != 0 and said in ranks[1].stderr, ranks[1].stderr
    assert ranks[0].returncode != 0
