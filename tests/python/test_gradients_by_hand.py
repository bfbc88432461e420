"""Gradients that no backward made: what the ranks have not exchanged is found, whenever and wherever it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep.agreement import same_but_for_rounding


def test_values_written_into_gradients_that_were_compared_are_refused_and_named(
    run_ranks: Callable[..., list[Any]],
) -> None:
    code = """
    import torch
    from torch import nn
    import evenstep as es

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, optimizer = es.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def refused(name):
        try:
            optimizer.step()
        except es.EvenstepError as error:
            return f"parameter {name!r} of model 'model'" in str(error)

    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # for the optimizer to make its state
    optimizer.step()
    x = torch.ones(3, 2) + es.rank()
    for p, gradient in zip(model.parameters(), torch.autograd.grad(model(x).mean(), model.parameters())):
        p.grad.copy_(gradient)
    assert refused("0.weight")
    es.exchange_gradients()
    optimizer.step()

    for p in model.parameters():
        p.grad = p.grad * 0.5  # the same on all ranks
    model[1].bias.grad = torch.full((1,), es.rank() + 1.0)
    assert refused("1.bias")
    """
    run_ranks(code)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_counts_as_rounding(dtype: torch.dtype) -> None:
    one = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    eps = torch.finfo(dtype).eps
    assert same_but_for_rounding(one, (one.double() * (1 + eps)).to(dtype))
    assert not same_but_for_rounding(one, (one.double() * 1.04).to(dtype))
    assert same_but_for_rounding(one * 0, one * 0) and not same_but_for_rounding(one, one * 0)


def test_numbers_that_are_not_finite_are_at_the_same_places() -> None:
    whole = torch.tensor([1.0, float("inf"), float("nan"), -1.0])
    assert same_but_for_rounding(whole, whole.clone())
    assert not same_but_for_rounding(torch.tensor([9.0, float("inf"), float("nan"), -1.0]), whole)
    assert not same_but_for_rounding(torch.tensor([1.0, 5.0, float("nan"), -1.0]), whole)
    assert not same_but_for_rounding(torch.tensor([float("nan")]), torch.tensor([0.0]))
    huge = torch.tensor([1e200, 1e200], dtype=torch.float64)
    assert same_but_for_rounding(huge, huge * (1 + 1e-15)) and not same_but_for_rounding(huge * 1.1, huge)
