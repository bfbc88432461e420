"""Losses that are no means over samples: a rank says so, where training would otherwise come out as something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from evenstep.loss_form import LossForm

SAMPLES, WHOLE = 6, 16
Y = torch.arange(SAMPLES) % 5
MASKED = Y.clone().masked_fill(Y == 2, -100)
KINDS = torch.tensor([0.1, 0.3, 0.2, 0.7, 0.9])


def divergence(x: torch.Tensor) -> torch.Tensor:
    """As of a variational auto-encoder."""
    return F.binary_cross_entropy(x.sigmoid(), torch.rand_like(x), reduction="sum") - 0.5 * torch.sum(1 + x - x.exp())


def told(loss: Callable[[torch.Tensor], torch.Tensor], *samples: int) -> str:
    """What is said of backwards from it, with so many samples each."""
    form = LossForm()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in samples or (SAMPLES,):
            x = torch.randn(count, 5, requires_grad=True)
            plan: Any = SimpleNamespace(samples=count, total=WHOLE)
            form.look(loss(x), plan)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.mse_loss(x, x.detach() + 1, reduction="sum"),
        lambda x: F.cross_entropy(x, Y, reduction="sum"),
        lambda x: F.cross_entropy(x, Y, reduction="none").sum(),
        lambda x: F.l1_loss(x, x.detach() + 1, reduction="sum") + 0.5 * x.mean(),
        divergence,
    ],
)
def test_a_sum_is_told(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "is a sum over samples" in told(loss) and "loss / len(x)" in told(loss)


def test_a_sum_divided_by_the_whole_batch_is_told_once_shares_have_differed() -> None:
    assert not told(lambda x: x.square().sum() / WHOLE, 6, 6)
    assert "divided by 16" in told(lambda x: x.square().sum() / WHOLE, 6, 7)


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (lambda x: F.cross_entropy(x, MASKED), 5),
        (lambda x: F.cross_entropy(x, MASKED, label_smoothing=0.1) / 2, 5),
        (lambda x: F.cross_entropy(x, Y, weight=KINDS), 2.3),
        (lambda x: x.square().sum() / torch.tensor(7), 7),
    ],
)
def test_a_mean_over_something_else_is_told(loss: Callable[[torch.Tensor], torch.Tensor], number: float) -> None:
    assert f"a mean over {number:g} " in told(loss) and "es.set_weight(n)" in told(loss)


def left(x: torch.Tensor) -> torch.Tensor:
    """As a mask leaves them."""
    return x.flatten()[: 3 * len(x) + 2]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: 65536 * F.mse_loss(left(x), torch.zeros_like(left(x))),
        lambda x: left(x).square().mean(),
    ],
)
def test_a_mean_over_another_number_each_time_is_told(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss, 6)  # it may be of weights
    assert "a mean over 23 " in told(loss, 6, 7)


def test_a_mean_over_weights_is_no_news() -> None:
    weights = [torch.ones(17, requires_grad=True), torch.ones(40, requires_grad=True)]
    assert not told(lambda x: F.mse_loss(x, x.detach() + 1) + sum(w.square().mean() for w in weights), 6, 7, 8, 5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.mse_loss(x, x.detach() + 1),
        lambda x: F.cross_entropy(x, Y) / 4 + 0.1 * F.smooth_l1_loss(x, x.detach() + 1),
        lambda x: F.cross_entropy(x, Y, label_smoothing=0.1),
        lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
        lambda x: divergence(x) / len(x),
        lambda x: x.square().sum() / x.numel(),
        lambda x: x.square().sum(1).mean(),
        lambda x: (1 / len(x)) * x.square().sum(),
        lambda x: F.mse_loss(x, x.detach() + 1) + 1e-3 * torch.ones(9, 9, requires_grad=True).square().sum(),
        lambda x: torch.stack([x.mean(), x.std(), x.square().mean()]).sum(),
        lambda x: x.square().mean(1),  # no number: torch refuses it, or gets a gradient with it
    ],
)
def test_means_over_samples_are_no_news(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not told(loss)


SCRIPT = """
    import warnings
    import torch
    import evenstep as es

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader, shares=lambda number, batch: [6, 2])

    def said(form):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, y in loader:
                optimizer.zero_grad()
                form(torch.nn.functional.mse_loss(model(x), y, reduction="sum"), x).backward()
                optimizer.step()
        return [one for one in caught if "sum over samples" in str(one.message)]

    def weighed(loss, x):
        es.set_weight(1)  # the script says itself what counts
        return loss

    assert not said(lambda loss, x: loss / len(x))
    assert not said(weighed)
    (one,) = said(lambda loss, x: loss)
    assert one.filename == __file__, one.filename
"""


def test_a_script_is_told_at_its_line(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(SCRIPT)
