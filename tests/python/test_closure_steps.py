"""Steps with a closure that count nothing leave no trace, and make as many closures as those of the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evenstep import closure_steps
from evenstep.closure_steps import ClosureStep, KeptOptimizer, WholeLoss
from evenstep.environment import read_environment
from evenstep.generation_passes import Passes
from evenstep.generation_told import Told, closures_due, late_weights
from evenstep.session import Session

Optimizers = Callable[[Any], torch.optim.Optimizer]
KINDS: list[Optimizers] = [
    lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=3, history_size=2),
    lambda p: torch.optim.LBFGS(p, lr=1.0, max_iter=4, line_search_fn="strong_wolfe"),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
]


class Training:
    def __init__(self, make: Optimizers) -> None:
        torch.manual_seed(2)
        self.model = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.optimizer = make(self.model.parameters())
        self.calls = 0

    def closure(self) -> torch.Tensor:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(1, 3, dtype=torch.float64)) - 1).pow(4).sum()
        loss.backward()
        return loss

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@pytest.mark.parametrize("make", KINDS)
def test_an_optimizer_goes_on_from_where_it_was_put_back(make: Optimizers) -> None:
    one, other = Training(make), Training(make)
    for training in (one, other):
        for _ in range(3):
            training.optimizer.step(training.closure)
    kept = KeptOptimizer(one.optimizer)
    for _ in range(2):  # as often as it must
        one.optimizer.step(one.closure)
        one.optimizer.step(one.closure)
        assert not torch.equal(one.values(), other.values())
        kept.put_back()
        assert torch.equal(one.values(), other.values())
    for training in (one, other):
        training.optimizer.step(training.closure)
    assert torch.equal(one.values(), other.values())


def test_the_whole_loss_is_asked_for_alike_on_all_ranks_and_can_be_differentiated() -> None:
    class Others:  # a session whose ranks have a loss of 7 together
        asked = 0

        def call_by_all(self, make: Callable[[], float]) -> float:
            self.asked += 1
            return 7.0

    given: list[Any] = []
    others: Any = Others()
    loss = WholeLoss(lambda *a, **o: given.append((a, o)) or one, others, sums=False, of_one=False)
    weight = torch.tensor(3.0, requires_grad=True)
    one: Any = weight * 2
    told = loss("a", backward=False)
    told.backward()
    assert given == [(("a",), {"backward": False})] and told.item() == 7.0 and weight.grad == 2.0
    one = 4.0
    assert loss() == 7.0 and others.asked == 2
    for one in (torch.ones(1), torch.ones(3), None, True):  # of a rank with one sample, of one with three
        assert loss() is one and others.asked == 2
    one = torch.ones(1)
    assert WholeLoss(lambda: one, others, sums=False, of_one=True)().tolist() == [7.0] and others.asked == 3


@pytest.mark.parametrize("make", KINDS)
def test_a_void_step_makes_as_many_closures_as_the_others_and_moves_nothing(make: Optimizers) -> None:
    for due in (0, 1, 3):
        one, passes = Training(make), Passes()
        before = one.values()
        passes._void_passes, passes._due = 1, {(0, 0): due}
        step = ClosureStep(one.optimizer, one.closure, passes)
        one.optimizer.step(step)
        step.take_back()
        assert one.calls == max(1, due) and torch.equal(one.values(), before) and not one.optimizer.state


def test_a_loss_within_a_step_ends_it() -> None:
    one, passes = Training(KINDS[0]), Passes()
    before, plain = one.values(), one.closure

    def loses() -> torch.Tensor:
        if one.calls == 1:  # in the second
            passes._void_passes, passes._due = 1, {(0, 0): 2}
        return plain()

    step = ClosureStep(one.optimizer, loses, passes)
    one.optimizer.step(step)
    assert not torch.equal(one.values(), before)
    step.take_back()
    assert one.calls == 2 and torch.equal(one.values(), before)


def _watched(one: Training, able: bool) -> Any:
    """A session in a job with --recovery, at a batch."""
    session: Any = Session(read_environment())
    passes: Any = Passes()
    passes.say, passes.can_go_on, passes.between_steps = (lambda why: None), able, (lambda: None)
    session.recovery = passes
    session.keep_pass_state = lambda: None
    session.optimizer_steps.watch(one.optimizer)
    passes.begins_pass()
    return session


def test_a_step_is_committed_at_its_end() -> None:
    one, steps = Training(KINDS[0]), []
    session = _watched(one, able=True)

    def closure() -> torch.Tensor:
        steps.append(session.step)
        return one.closure()

    one.optimizer.step(closure)
    assert steps == [0] * len(steps) and len(steps) > 1 and session.step == 1


def test_a_factor_on_the_rates_counts_for_closures_too() -> None:
    def moved(factor: float) -> torch.Tensor:
        one = Training(lambda p: torch.optim.SGD(p, lr=0.125))
        before = one.values()
        _watched(one, able=True).rates.factor = factor
        one.optimizer.step(one.closure)
        assert one.optimizer.param_groups[0]["lr"] == 0.125
        return one.values() - before

    assert torch.allclose(moved(4.0), 4 * moved(1.0), rtol=1e-12) and moved(1.0).any()


def test_nothing_is_kept_where_nobody_could_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(closure_steps, "KeptOptimizer", kept.append)
    for able in (False, True):
        one = Training(KINDS[2])
        _watched(one, able)
        one.optimizer.step(one.closure)
        assert len(kept) == able and one.calls == 1


def _told(position: tuple[int, int], closures: tuple[int, int, int], late: dict[int, float] | None = None) -> Told:
    base: Any = ([0, 1], (*position, 0, False, False), 0, b"", None, "cpu:0", "box", 0, [], [], [], {})
    return Told(*base, None, closures, [late or {}])


def test_who_is_still_in_the_meeting_of_a_step_has_begun_nothing_of_the_next() -> None:
    told = [_told((4, 0), (0, 0, 3)), _told((5, 0), (0, 0, 1)), _told((5, 0), (0, 1, 2))]
    assert closures_due(told, 5) == {(0, 0): 1, (0, 1): 2}
    assert closures_due(told, 4) == {(0, 0): 3}


def test_late_rounds_are_those_that_stand_with_what_is_left_of_their_weights() -> None:
    told = [
        _told((7, 0), (0, 0, 0), {4: 0.25, 5: 0.5, 6: 0.5}),
        _told((6, 0), (0, 0, 0), {4: 0.25, 5: 0.25, 6: 0.25, 7: 0.5}),
        _told((7, 0), (0, 0, 0)),  # it joins
    ]
    assert late_weights(told, 0, 7, 2) == {5: 0.75, 6: 0.75}


def test_a_step_after_one_that_raised_makes_its_closure() -> None:
    one, passes = Training(KINDS[0]), Passes()

    def raises() -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        one.optimizer.step(ClosureStep(one.optimizer, raises, passes))
    passes._void_passes = 1
    one.optimizer.step(ClosureStep(one.optimizer, one.closure, passes))
    assert one.calls == 1
