"""Prepared learning-rate schedulers: which of their steps count, and that copies are theirs no more."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as lr

from evenstep.pass_state import PassState
from evenstep.schedulers import SchedulerSteps


class Owns(lr.LRScheduler):
    """Says itself how it is copied."""

    def get_lr(self) -> list[float]:
        return [group["initial_lr"] / (1 + self.last_epoch) for group in self.optimizer.param_groups]

    def __reduce__(self) -> Any:
        return type(self), (self.optimizer,), {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs}


def optimizer() -> SGD:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)


def sequential(opt: SGD) -> lr.SequentialLR:
    return lr.SequentialLR(opt, [lr.ConstantLR(opt, 0.1, 2), lr.ExponentialLR(opt, 0.5)], [2])


KINDS: dict[str, Callable[[SGD], Any]] = {
    "step": lambda opt: lr.StepLR(opt, 2, 0.5),
    "cosine": lambda opt: lr.CosineAnnealingLR(opt, 8),
    "plateau": lambda opt: lr.ReduceLROnPlateau(opt, patience=0),
    "one cycle": lambda opt: lr.OneCycleLR(opt, 1.0, total_steps=9),
    "sequential": sequential,
    "own": Owns,
}


def copies(scheduler: Any) -> list[Any]:
    saved = io.BytesIO()
    torch.save(scheduler, saved)
    saved.seek(0)
    pickled = [pickle.loads(pickle.dumps(scheduler, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [copy.deepcopy(scheduler), copy.copy(scheduler), torch.load(saved, weights_only=False), *pickled]


def steps(scheduler: Any, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        scheduler.optimizer.step()
        scheduler.step(*((1.0,) if isinstance(scheduler, lr.ReduceLROnPlateau) else ()))
        rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_are_plain_and_go_on(kind: str) -> None:
    plain, watched = KINDS[kind](optimizer()), KINDS[kind](optimizer())
    counted = SchedulerSteps(lambda: False)
    counted.watch("scheduler", watched)
    assert steps(plain, 3) == steps(watched, 3)
    assert plain.state_dict().keys() == watched.state_dict().keys()
    expected = steps(copy.deepcopy(plain), 3)
    for one in copies(watched):
        assert type(one) is type(plain)
        rates = steps(copy.deepcopy(one), 3)  # a shallow copy shares its optimizer with the next
        assert rates == expected
    assert counted.made() == {"scheduler": 3}
    assert steps(watched, 3) == expected


def test_steps_that_a_checkpoint_has_are_not_made_again() -> None:
    training = False
    counted = SchedulerSteps(lambda: training)
    scheduler = lr.ExponentialLR(optimizer(), 0.5)
    counted.watch("scheduler", scheduler)
    counted.replay({"scheduler": 2})
    assert steps(scheduler, 3) == [0.5, 0.5, 0.25]
    training = True
    assert steps(scheduler, 1) == [0.125] and counted.made() == counted.total() == {"scheduler": 3}
    training = False
    counted.replay({"scheduler": 3})
    counted.go_on({"scheduler": 2})  # the script skips to where it had come by two
    assert counted.total() == {"scheduler": 3}
    assert steps(scheduler, 2) == [0.125, 0.0625]
    counted.replay({"scheduler": 3})
    counted.go_on()
    assert steps(scheduler, 1) == [0.03125]


def test_what_another_scheduler_steps_is_its_own_business() -> None:
    def made(watch: bool) -> tuple[SchedulerSteps, Any]:
        counted = SchedulerSteps(lambda: False)
        opt = optimizer()
        inner = [lr.ConstantLR(opt, 0.1, 2), lr.ExponentialLR(opt, 0.5)]
        outer = lr.SequentialLR(opt, inner, [2])
        for number, one in enumerate([*inner, outer] if watch else []):
            counted.watch(str(number), one)
        return counted, outer

    plain, (counted, outer) = made(False)[1], made(True)
    expected = steps(plain, 6)
    assert steps(outer, 4) == expected[:4]
    assert counted.total() == {"0": 0, "1": 0, "2": 4}
    resumed, again = made(True)
    again.load_state_dict(outer.state_dict())
    again.optimizer.load_state_dict(outer.optimizer.state_dict())
    resumed.replay(counted.total())
    assert steps(again, 6)[4:] == expected[4:]


METRICS = """
import sys
import warnings
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
import evenstep as es
from evenstep.group import gather_objects


class Warmup(LRScheduler):
    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, metric=None):
        if metric is not None:
            self.after.step(metric)


model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
after = ReduceLROnPlateau(optimizer, patience=0)
model, optimizer, after, warmup = es.prepare(model, optimizer, after, Warmup(optimizer, after))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    if sys.argv[1] == "apart":
        warmup.step(1.0 + es.rank())
        assert after.best == 1.5, after.best
    elif sys.argv[1] == "rounding":
        warmup.step(0.5 + 1e-7 * es.rank())
        assert abs(after.best - (0.5 + 0.5e-7)) < 1e-12, after.best
    else:
        try:
            if es.rank() == 0:
                after.step(1.0)
            else:
                gather_objects(es.session().group, ("another call's", 1))
        except es.EvenstepError as error:
            print(error)
print(sum("another number on each rank" in str(one.message) for one in told))
"""


def test_a_wrapper_around_one_that_follows_a_metric_agrees_too(run_ranks: Callable[..., list[Any]]) -> None:
    assert [run.stdout for run in run_ranks(METRICS, args=["apart"])] == ["1\n", "0\n"]


def test_metrics_that_differ_by_rounding_are_no_news(run_ranks: Callable[..., list[Any]]) -> None:
    assert [run.stdout for run in run_ranks(METRICS, args=["rounding"])] == ["0\n", "0\n"]


def test_a_step_on_one_rank_alone_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    first = run_ranks(METRICS, args=["alone"])[0].stdout
    assert "rank 1 made another call where rank 0 was in ReduceLROnPlateau.step, which all ranks make" in first, first


@pytest.mark.parametrize("given", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_batches_that_come_again_are_undone(kind: str, given: Any) -> None:
    """As of one that a GradScaler skips, and a rank is lost in the next: both come again, and what stands before them stays."""
    uncertain = False
    plain, watched = (KINDS[kind](SGD([torch.nn.Parameter(torch.ones(2))], lr=copy.deepcopy(given))) for _ in range(2))
    rate = watched.optimizer.param_groups[0]["lr"]
    counted = SchedulerSteps(lambda: True)
    counted.uncertain = lambda: uncertain
    state = PassState({}, {}, {}, counted)
    counted.watch("scheduler", watched)
    expected = [steps(plain, 1) for _ in range(6)]
    for number in range(3):
        uncertain = False
        assert steps(watched, 1) == expected[2 * number]
        state.keep()  # the next pass begins
        uncertain = True
        for _ in range(2):
            before, group = copy.deepcopy(watched.state_dict()), dict(watched.optimizer.param_groups[0])
            group["lr"] = float(group["lr"])
            steps(watched, 2)
            state.put_back()
            state.put_back()  # whatever is undone is so once
            assert watched.state_dict() == before and watched.optimizer.param_groups[0] == group
        assert steps(watched, 1) == expected[2 * number + 1]
        state.keep()
        state.put_back()  # what stands by now is not undone
        assert watched.optimizer.param_groups[0]["lr"] == expected[2 * number + 1][0]
    assert not isinstance(rate, torch.Tensor) or watched.optimizer.param_groups[0]["lr"] is rate
