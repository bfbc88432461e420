"""Ranks that run a share as several micro-batches: what one costs beyond its samples is measured, told in the vote, and known to
the shares. Times are given here; no clock decides."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from evenstep import _core, vote
from evenstep.exact_blocks import BlockShares
from evenstep.piece_times import PieceTimes
from evenstep.shares import Shares
from evenstep.step_in_pieces import StepInPieces

SIZE, MORE = 16, 6.0


def pieces(samples: int, slow: float = 1.0, size: int = SIZE, more: float = MORE) -> list[tuple[int, float]]:
    """A millisecond a sample, and `more` for each micro-batch."""
    cut = [size] * (samples // size) + ([samples % size] if samples % size else [])
    return [(one, 0.001 * slow * (more + one)) for one in cut]


def test_what_a_micro_batch_costs_is_seen_by_smaller_ones_whatever_the_ranks_speed() -> None:
    times = PieceTimes()
    for number in range(20):
        times.take(SIZE, pieces(32 + 1 + number % 10, slow=1.0 if number % 2 else 4.0))
        assert times.told[0] == SIZE and (times.told[1] > 0) == (number >= 7)
    assert times.told[1] == pytest.approx(MORE)


def test_one_slow_piece_in_four_is_no_news() -> None:
    times = PieceTimes()
    for number in range(40):
        took = pieces(40)
        if number % 4 == 0:
            took[-1] = took[-1][0], 5 * took[-1][1]
        times.take(SIZE, took)
    assert times.told == (SIZE, pytest.approx(MORE))


@pytest.mark.parametrize("samples", [16, 32, 31, 9])
def test_without_a_whole_one_and_a_smaller_one_nothing_is_known(samples: int) -> None:
    times = PieceTimes()
    for _ in range(20):
        times.take(SIZE, pieces(samples))
    assert times.told == (SIZE, 0.0)


def test_a_device_that_takes_as_long_for_any_number_and_one_that_costs_nothing() -> None:
    flat, steep = PieceTimes(), PieceTimes()
    for _ in range(20):
        flat.take(SIZE, [(SIZE, 0.05), (3, 0.05)])
        steep.take(SIZE, pieces(40, more=0.0))
    assert flat.told == (SIZE, 8 * SIZE)
    assert steep.told == (SIZE, 0.0)


def test_other_sizes_are_learned_anew() -> None:
    times = PieceTimes()
    for _ in range(20):
        times.take(SIZE, pieces(40))
    times.take(8, pieces(20, size=8))
    assert times.told == (8, 0.0)


def test_a_size_that_moves_a_little_each_step_is_no_other_one() -> None:
    times = PieceTimes()
    for number in range(20):
        size = SIZE - number // 3
        times.take(size, pieces(2 * size + 1, size=size))
    assert times.told == (SIZE - 6, pytest.approx(MORE))


def test_the_vote_tells_it() -> None:
    ballot = vote.Ballot(1, 2, 3, 4, 0.5, 0.0, 1.0, 0, 0, 0, 0, 0, 0, 1, micro_batch=16, piece_samples=6.5)
    assert vote.unpack(ballot.pack()) == ballot


def seconds(samples: int) -> float:
    return 0.001 + 0.001 * (samples + MORE * math.ceil(samples / SIZE))


def run(shares: Shares, steps: int, told: bool) -> list[int]:
    drawn: list[int] = []
    for _ in range(steps):
        drawn = shares.draw(64)
        if told:
            shares.take_micro_batches([(SIZE, MORE), (0, 0.0)])
        shares.observe([(drawn[0], seconds(drawn[0])), (drawn[1], 0.001 + 0.004 * drawn[1])], 1.0)
    return drawn


def test_a_share_is_whole_micro_batches_where_that_is_faster() -> None:
    assert run(Shares("auto", 2, 64), 100, told=True) == [48, 16]


def test_shares_of_another_batch_or_other_ranks_hear_it_again() -> None:
    shares = Shares("auto", 2, 64)
    run(shares, 60, told=True)
    half = shares.of_batch(32)
    half.take_micro_batches([(SIZE, MORE), (0, 0.0)])
    assert half._balancer.predict(0, 17) - half._balancer.predict(0, 16) == pytest.approx(0.007, rel=0.1)
    three = shares.anew(None, [None] * 3, [*shares.of_each(), None])
    three.take_micro_batches([(SIZE, MORE), (0, 0.0), (0, 0.0)])
    assert three._balancer.predict(0, 17) - three._balancer.predict(0, 16) == pytest.approx(0.007, rel=0.1)


def test_shares_of_blocks_and_schedules_need_it_not() -> None:
    blocks = BlockShares("auto", 2, 64, None, None, 4)
    blocks.take_micro_batches([(SIZE, MORE), (0, 0.0)])
    assert blocks.draw(64) == [32, 32]
    scheduled = Shares("auto", 2, 64, schedule=lambda number, batch: [batch // 2, batch - batch // 2])
    scheduled.take_micro_batches([(SIZE, MORE), (0, 0.0)])
    assert scheduled.draw(64) == [32, 32]


def test_wrong_numbers_are_refused() -> None:
    balancer = _core.Balancer("auto", 2, 64)
    with pytest.raises(_core.EvenstepError, match="rank 1"):
        balancer.set_micro_batches([16, -1], [6.0, 0.0])
    with pytest.raises(_core.EvenstepError, match="rank 0"):
        balancer.set_micro_batches([16, None], [math.nan, 0.0])
    with pytest.raises(ValueError, match="sizes"):
        balancer.set_micro_batches([16], [6.0, 0.0])
    with pytest.raises(TypeError, match="size"):
        balancer.set_micro_batches(None, [6.0, 0.0])  # type: ignore[arg-type]


SCRIPT = """
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep.piece_times import PieceTimes

PieceTimes.told = property(lambda times: (times._size, 4.5 if times._size else 0.0))  # no clock decides
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(640, 8), torch.randn(640, 1))
config = es.Config(policy="equal", micro_batch=6 if os.environ["RANK"] == "1" else None)
trainer = es.Trainer(model, optimizer, lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), config=config)
trainer.fit(DataLoader(data, batch_size=32))
print([loader.shares._micro_batches for loader in es.session().loaders.values()])
"""


def test_all_ranks_of_a_job_know_the_same(run_ranks: Callable[..., list[Any]]) -> None:
    told = [ast.literal_eval(rank.stdout.splitlines()[-1]) for rank in run_ranks(SCRIPT)]
    assert told == [[[(0, 0.0), (6, 4.5)]]] * 2


class Stands:
    """A rank's session, as far as StepInPieces looks at it."""

    rank = 0

    def __init__(self) -> None:
        self.latest = None
        self.steps = SimpleNamespace(micro_batch=(0, 0.0), memory=None, syncs=[], buffers=None)


def steps_of(most: int | None, told: tuple[int, float]) -> StepInPieces:
    model = torch.nn.Linear(3, 1)
    made = StepInPieces(model, lambda model, batch: (model(batch).mean(), None), lambda loss: loss, most)
    made._times = SimpleNamespace(told=told, take=lambda size, took: None)  # type: ignore[assignment]
    return made


def test_what_is_no_longer_so_is_taken_back() -> None:
    current: Any = Stands()
    pieces_of_four = steps_of(4, (4, 2.5))
    pieces_of_four.run(current, torch.zeros(10, 3))
    assert current.steps.micro_batch == (4, 2.5)
    pieces_of_four.run(current, torch.zeros(3, 3))  # a share of one of them
    assert current.steps.micro_batch == (4, 2.5)
    pieces_of_four._micro_batch = 8  # a cap rises
    pieces_of_four.run(current, torch.zeros(6, 3))
    assert current.steps.micro_batch == (0, 0.0)
    steps_of(4, (4, 2.5)).run(current, torch.zeros(10, 3))
    steps_of(None, (0, 0.0)).run(current, torch.zeros(10, 3))  # another Trainer
    assert current.steps.micro_batch == (0, 0.0)
    whole = steps_of(None, (4, 2.5))
    whole._most = 4
    whole._why_not = lambda *given: "for want of rows"  # type: ignore[method-assign]
    whole.run(current, torch.zeros(10, 3))  # at once, as it cannot be cut
    assert current.steps.micro_batch == (0, 0.0)
