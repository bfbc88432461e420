"""Steps that are to apply nothing, some of which raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstep.environment import read_environment
from evenstep.generation_passes import Passes
from evenstep.hidden_gradients import HiddenGradients
from evenstep.session import Session


def _training() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 4.0)
    return parameter, torch.optim.SGD([parameter], lr=0.25)


def test_hidden_gradients_are_not_applied_and_come_back() -> None:
    parameter, optimizer = _training()
    mine, hidden = parameter.grad, HiddenGradients()
    hidden.hide(optimizer)
    hidden.hide(optimizer)  # for another reason, too
    optimizer.step()
    assert parameter.tolist() == [1.0, 1.0]
    hidden.put_back()
    assert parameter.grad is mine


def test_gradients_come_back_where_a_step_raised() -> None:
    """One that raises has no end that would put them back."""
    parameter, optimizer = _training()
    mine, hidden = parameter.grad, HiddenGradients()
    hidden.hide(optimizer)
    hidden.put_back_after_error()  # the next call
    assert parameter.grad is mine
    hidden.hide(optimizer)
    parameter.grad = newer = torch.zeros(2)  # of a backward in between
    hidden.put_back_after_error()
    assert parameter.grad is newer


class _Loss(Passes):
    """Where a rank was lost in the pass under way."""

    void = True  # type: ignore[assignment]
    can_go_on = True

    def turn_ended(self, counts: bool) -> None:
        raise AssertionError("the step raised before its end")


def test_a_void_step_that_raised_hides_nothing_of_the_next() -> None:
    session: Any = Session(read_environment())
    parameter, optimizer = _training()
    session.recovery = _Loss()
    session.optimizer_steps.watch(optimizer)

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    session.recovery = None
    optimizer.step()
    assert parameter.tolist() == [0.0, 0.0] and session.step == 1
