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

from evenstep import _core, micro_batches, vote
from evenstep.batch_search import Trial
from evenstep.batch_size import DeviceBatchSize
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
    made = StepInPieces([model], lambda batch: (model(batch).mean(), None), lambda loss: loss, most)
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


def device(rates: dict[int, float], stopped_by: str = "most", fits: int = 10**9) -> DeviceBatchSize:
    """Of one that makes so many samples a second with so many at once, and holds `fits`."""
    trials = tuple(Trial(size, None, size, size / rate, size <= fits) for size, rate in sorted(rates.items()))
    return DeviceBatchSize(1, "cpu:0", 0, 0, None, 0, "", stopped_by, trials)


@pytest.mark.parametrize(
    ("rates", "stopped_by", "fits", "size"),
    [
        ({2: 100.0, 4: 180.0, 8: 300.0, 16: 400.0}, "most", 99, None),  # more are faster
        ({2: 100.0, 4: 180.0, 8: 300.0, 16: 400.0}, "memory", 8, 8),  # and no more are held
        ({2: 100.0, 4: 180.0, 8: 300.0, 16: 400.0}, "seconds", 99, None),
        ({2: 100.0, 4: 400.0, 8: 300.0, 16: 250.0}, "most", 99, 4),  # as of caches
        ({2: 100.0, 4: 400.0, 8: 395.0, 16: 250.0}, "most", 99, 8),  # about as fast, and fewer pieces
        ({2: 100.0, 4: 400.0, 8: 395.0, 16: 390.0}, "most", 99, None),
        ({2: 100.0, 4: 400.0, 8: 395.0, 16: 390.0}, "memory", 8, 8),
        ({2: 100.0}, "memory", 1, None),  # not one was held: the step itself finds out what is
    ],
)
def test_the_best_size_of_a_device(rates: dict[int, float], stopped_by: str, fits: int, size: int | None) -> None:
    assert micro_batches.size_of(device(rates, stopped_by, fits)) == size


def test_it_is_said_why() -> None:
    rates = {2: 100.0, 4: 400.0, 8: 300.0, 16: 250.0}
    assert micro_batches.in_words(device(rates), 4) == "runs 4 samples at once (400 a second, of 16 250)"
    assert micro_batches.in_words(device(rates, fits=8), 8) == "runs 8 samples at once (which memory holds)"
    assert micro_batches.in_words(device(rates), None) == "runs its share in one"


def test_a_smaller_one_that_took_longer_is_chance() -> None:
    trials = [Trial(2, None, 0, 0.5, True), Trial(4, None, 0, 0.2, True), Trial(8, None, 0, 0.3, True)]
    assert micro_batches.rising(trials) == [(2, 0.2), (4, 0.2), (8, 0.3)]
    _core.best_micro_batch(micro_batches.rising(trials), 8)


MEASURED = """
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep as es
from evenstep import batch_trials, micro_batches

rank, whole = int(os.environ["RANK"]), sys.argv[1] == "whole"
micro_batches.SECONDS = 1e9  # no clock decides
tried, run = [], batch_trials.TrialRuns.run

def made_up(self, samples, limit):
    peak, _ = run(self, samples, limit)
    tried.append(samples)
    return peak, samples / (400 if rank == 1 and samples == 4 else 100)

batch_trials.TrialRuns.run = made_up
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(96, 8).double(), torch.randn(96, 1).double())
seen = []

def step(model, batch):
    seen.append(len(batch[0]))
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return (loss, 2.0 * len(batch[0])) if "weights" in sys.argv else loss

auto = None if whole or sys.argv[1] == "unlike" and rank else "auto"
shares = None if whole else lambda number, batch: [batch - 10 - number, 10 + number]
trainer = es.Trainer(model, optimizer, step, config=es.Config(shares=shares, micro_batch=auto))
prefer = trainer._pieces[0].prefer
begins = 0

def preferred(size):
    global begins
    begins = len(seen)
    prefer(size)

trainer._pieces[0].prefer = preferred
trainer.fit(DataLoader(data, batch_size=32, shuffle=True), epochs=1)
print(seen[begins:])
print([p.tolist() for p in model.parameters()])
print(len(tried))
"""


def test_each_rank_runs_the_size_that_was_fastest(run_ranks: Callable[..., list[Any]]) -> None:
    """And all together train as one device does."""
    (one,) = run_ranks(MEASURED, ranks=1, args=("whole",))
    first, second = run_ranks(MEASURED, args=("auto", "weights"))
    assert ast.literal_eval(first.stdout.splitlines()[0]) == [22, 21, 20]
    assert ast.literal_eval(second.stdout.splitlines()[0]) == [4, 4, 2, 4, 4, 3, 4, 4, 4]
    values = [ast.literal_eval(rank.stdout.splitlines()[1]) for rank in (one, first, second)]
    flat = [torch.cat([torch.tensor(p, dtype=torch.float64).reshape(-1) for p in each]) for each in values]
    assert torch.equal(flat[1], flat[2]) and float((flat[0] - flat[1]).norm() / flat[0].norm()) < 1e-12
    said = "micro_batch='auto': rank 0 runs its share in one, rank 1 runs 4 samples at once (400 a second, of 32 100)"
    assert [said in rank.stderr for rank in (first, second)] == [True, False], first.stderr
    assert all(int(rank.stdout.splitlines()[2]) > 3 for rank in (first, second)) and "micro_batch" not in one.stderr


def test_one_rank_cannot_measure_alone(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(MEASURED, args=("unlike",), check=False):
        words = "rank 0 has es.Config(micro_batch='auto') and rank 1 has not"
        assert rank.returncode == 1 and words in rank.stderr, rank.stderr
