"""A rank of es.Trainer that runs out of memory makes its part of the batch in pieces: the step is the same, and later shares are
smaller where the others can take the rest. The memory really is short: RLIMIT_AS."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script_parts import EVENTS
from torch import nn

from evenstep import step_in_pieces

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

os.environ.setdefault("EVENSTEP_KEEP_MEMORY", "0")  # it sees limits of addresses only where they are there at its begin
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


def test_pieces_are_made_where_freed_memory_was_kept(run_ranks: Callable[..., list[Any]]) -> None:
    whole = undisturbed(run_ranks)
    for values, shares, calls, _ in results(run_ranks(SCRIPT, args=["both"], env={"EVENSTEP_KEEP_MEMORY": "1"})):
        assert values == pytest.approx(whole, rel=1e-11) and shares == [[16, 16]] * 4
        assert calls[0] == 16 and max(calls[1:]) <= 8 and sum(calls[1:]) >= 64, calls


def test_a_share_may_be_several_micro_batches(run_ranks: Callable[..., list[Any]]) -> None:
    """On one rank alone, which is the faster so."""
    whole = undisturbed(run_ranks)
    first, second = results(run_ranks(SCRIPT, args=["micro"]))
    assert first[0] == second[0] == pytest.approx(whole, rel=1e-11)
    assert first[1:] == [[[16, 16]] * 4, [16] * 4, []]
    assert second[1:] == [[[16, 16]] * 4, [5, 5, 5, 1] * 4, []]


def run(monkeypatch: pytest.MonkeyPatch, batch: Any, loss: Any, most: int | None, scale: float = 1.0) -> Any:
    """One rank's step, with a model of its own: the gradients, the loss and what it is a mean over."""
    told: list[float] = []
    monkeypatch.setattr(step_in_pieces, "set_weight", told.append)
    torch.manual_seed(3)
    model = nn.Linear(4, 3).double() if batch[0].dtype is torch.float64 else nn.Linear(4, 3)
    steps = SimpleNamespace(memory=None, syncs=[], buffers=None, mends_memory=False, ran_short=False)
    session: Any = SimpleNamespace(latest=None, steps=steps, rank=0)
    pieces = step_in_pieces.StepInPieces([model], functools.partial(loss, model), lambda one: one * scale, most)
    pieces.run(session, batch)
    assert told in ([], [pieces.amount])
    return [p.grad for p in model.parameters()], pieces.loss, pieces.amount


@pytest.mark.parametrize("most", [3, 4, 5, 7])
def test_a_piece_that_counts_nothing_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    counts = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    batch = torch.randn(22, 4, dtype=torch.float64), counts

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        x, counts = batch
        return (model(x).square().mean(1) * counts).sum() / counts.sum(), float(counts.sum())

    gradients, mean, amount = run(monkeypatch, batch, loss, most)
    whole, whole_mean, whole_amount = run(monkeypatch, batch, loss, None)
    assert (mean, amount) == (pytest.approx(whole_mean), whole_amount)
    for one, other in zip(gradients, whole):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    batch[0][5, 0] = math.nan  # of a sample that counts
    gradients, mean, _ = run(monkeypatch, batch, loss, most)
    assert math.isnan(mean) and gradients[0].isnan().any()
    counts.zero_()
    gradients, mean, amount = run(monkeypatch, batch, loss, most)
    assert (mean, amount) == (0.0, 0.0) and all(not one.any() for one in gradients)


@pytest.mark.parametrize("amounts", [False, True])
def test_a_scaled_loss_overflows_in_pieces_no_sooner(monkeypatch: pytest.MonkeyPatch, amounts: bool) -> None:
    """What fp16 holds of the whole batch's gradients it holds of each piece's; to a power of two they are the same."""
    batch = (torch.randn(64, 4),)

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float | None]:
        return model(batch[0]).half().float().mean(), 512.0 * len(batch[0]) if amounts else None

    whole, _, _ = run(monkeypatch, batch, loss, None, 2.0**22)
    gradients, _, _ = run(monkeypatch, batch, loss, 16, 2.0**22)
    for one, other in zip(gradients, whole):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("how", "said"), [("single", "ran out of memory with a single sample"), ("norm", "the model has BatchNorm")]
)
def test_what_cannot_be_mended_is_said(run_ranks: Callable[..., list[Any]], how: str, said: str) -> None:
    ranks = run_ranks(SCRIPT, args=[how], check=False)
    assert ranks[1].returncode != 0 and said in ranks[1].stderr, ranks[1].stderr
    assert ranks[0].returncode != 0


def test_parameters_that_are_added_up_share_no_sum() -> None:
    """torch gives both one and the same gradient."""
    left, right = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    sums, amounts, counts = step_in_pieces._Sums(2), (1.0, 3.0, 2.0), (1.0, 4.0, 0.5)
    for amount, each in zip(amounts, counts):
        sums.add(torch.autograd.grad(((left + right) * amount).sum(), [left, right]), each)
    sums.divide(2.0)
    expected = sum(amount * each for amount, each in zip(amounts, counts)) / 2.0
    assert [gradient.tolist() for gradient in sums.gradients if gradient is not None] == [[expected] * 3] * 2


def test_what_fits_fp16_stays_there_however_unlike_the_pieces_count() -> None:
    sums = step_in_pieces._Sums(1)
    for each in (1.0, 1000.0):
        sums.add([torch.full((2,), 1000.0, dtype=torch.float16)], each)
    sums.divide(2000.0)
    (gradient,) = sums.gradients
    assert gradient is not None and torch.allclose(gradient.float(), torch.tensor([500.5, 500.5]), rtol=2e-3)
