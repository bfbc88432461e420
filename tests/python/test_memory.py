"""Shares that memory limits: what a rank measures, what all ranks make of it, and what is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from script_parts import EVENTS

from evenstep import EvenstepError, _core
from evenstep.environment import read_environment
from evenstep.memory import UNKNOWN, MemoryWatch, Use
from evenstep.shares import Shares, none_alone

MIB = 1 << 20


class Invented:
    """A memory of `limit` bytes, of which `base` and so many a sample are held by the rank at its peak."""

    reserve = 0.0
    pool = "invented"

    def __init__(self, base: int, per_sample: int, limit: int, resets: bool = True) -> None:
        self.base, self.per_sample, self.limit, self.resets = base, per_sample, limit, resets
        self.samples, self.taken, self.highest, self.kept = 0, 0, 0, 0

    def read(self) -> Use:
        peak = self.base + self.kept + self.per_sample * self.samples
        self.highest = max(self.highest, peak)
        return Use(self.base, peak if self.resets else self.highest, self.limit - self.taken - self.base, self.limit)

    def reset(self) -> bool:
        return self.resets

    def give_back(self) -> None:
        self.kept = 0

    def run(self, watch: MemoryWatch, samples: int, step: int = 1) -> None:
        self.samples = samples
        watch.stepped(step, samples, [samples])


@settings(max_examples=200, deadline=None)
@given(
    base=st.integers(1, 1000),
    per_sample=st.integers(1, 50),
    truth=st.integers(4, 500),
    first=st.integers(2, 4),
    resets=st.booleans(),
)
def test_shares_grow_into_all_of_the_memory_and_no_further(
    base: int, per_sample: int, truth: int, first: int, resets: bool
) -> None:
    memory = Invented(base, per_sample, base + per_sample * truth, resets)
    watch = MemoryWatch(memory)
    assert (watch.cap, watch.room) == (-1, UNKNOWN)
    memory.run(watch, 1)  # of one size alone what is held whatever the share is not known
    share = first
    for _ in range(40):
        memory.run(watch, share)
        assert share + watch.room <= truth and watch.room >= 0
        share = min(share + watch.room, 2 * share + 1)  # as the balancer does: at most twice what was measured
    assert share == truth and watch.cap == -1


def test_a_limit_of_ones_own_counts_beside_what_the_memory_has() -> None:
    memory = Invented(100, 10, 10_000)
    watch = MemoryWatch(memory, limit=250)
    memory.run(watch, 20)
    assert watch.cap == 15  # 10 a sample too much: by what is freed after backward, not in proportion to all
    assert watch.room > 100


def test_other_processes_and_other_ranks_take_of_the_memory() -> None:
    memory = Invented(100, 10, 600)
    watch = MemoryWatch(memory)
    memory.run(watch, 10)
    before = watch.room
    memory.taken = 200
    for step in range(2, 5):
        memory.run(watch, 10, step)
    assert watch.room == before - 10  # 20 a sample, as far as is known
    memory.taken = 0
    watch.others(300.0)  # at the peak of their step
    memory.run(watch, 20, 5)
    assert watch.room <= 1
    assert watch.growth == 200.0


def test_steps_of_one_split_are_not_measured_for_ever() -> None:
    memory = Invented(100, 10, 600)
    watch = MemoryWatch(memory)
    for step in range(1, 10):
        memory.run(watch, 10, step)
    memory.taken = 200
    room = watch.room
    memory.run(watch, 10, 63)
    assert watch.room == room
    memory.run(watch, 10, 64)
    assert watch.room < room


def test_a_line_that_the_first_step_made_too_flat_is_not_trusted() -> None:
    memory = Invented(1000, 10, 2000)
    watch = MemoryWatch(memory)
    memory.base = 1190  # libraries that are loaded once, freed again
    memory.run(watch, 10)
    memory.base = 1000
    memory.run(watch, 30)
    assert 30 + watch.room <= 100


def test_the_allocator_keeps_nothing_where_a_limit_is_passed() -> None:
    memory = Invented(100, 10, 10_000)
    watch = MemoryWatch(memory, limit=250)
    memory.kept = 80
    memory.run(watch, 12)
    assert memory.kept == 0 and watch.cap < 12  # 300 were held
    for step in range(2, 9):
        memory.run(watch, 10, step)
        memory.kept = 80
    assert memory.kept == 80  # 200: what is kept for later is the allocator's affair


def learned(shares: Shares, *reports: tuple[int, int, int, int | None]) -> tuple[int, str] | None:
    return shares.take_memory(list(reports))


def fast_and_slow(shares: Shares, slower: float = 3.0, steps: int = 12) -> None:
    for _ in range(steps):
        one, other = shares.draw(64)
        shares.observe([(one, 0.001 * one), (other, 0.001 * slower * other)], 0.1)


def test_no_share_is_larger_than_what_memory_holds_and_it_is_said() -> None:
    shares = Shares("hybrid", 2, 64)
    fast_and_slow(shares)
    assert shares.draw(64)[0] >= 46
    news = learned(shares, (1, 48, -1, -8), (2, 16, -1, 400))
    assert news is not None and news[0] == 1 and news[1].startswith("memory holds 40 of 4"), news
    assert news[1].endswith(" samples on rank 0")
    for _ in range(100):
        assert shares.draw(64) == [40, 24]
        fast_and_slow(shares, steps=1)
    assert learned(shares, (1, 40, -1, 0), (2, 24, -1, 400)) is None
    assert learned(shares, (1, 40, -1, 2), (2, 24, -1, 400)) is None  # 42: not worth trials that begin anew
    assert shares.draw(64) == [40, 24]
    news = learned(shares, (1, 40, -1, 100), (2, 24, -1, 400))
    assert news == (0, "memory holds the best share of every rank again")
    fast_and_slow(shares)
    assert shares.draw(64)[0] >= 46


def test_every_policy_keeps_to_the_caps() -> None:
    for policy in ("equal", "proportional", "dynamic", "hybrid", "auto"):
        shares = Shares(policy, 2, 64, speeds=[3.0, 1.0])
        learned(shares, (1, 32, -1, None), (2, 32, 20, None))
        assert shares.draw(64)[1] == (20 if policy in ("equal", "dynamic") else 16)
        assert learned(shares, (1, 44, -1, None), (2, 20, 10, None)) is not None
        assert shares.draw(64)[1] == 10


def test_ranks_that_share_a_memory_may_move_samples_among_themselves() -> None:
    shares = Shares("hybrid", 2, 64)
    assert learned(shares, (1, 32, -1, 0), (1, 32, -1, 0)) is None  # the whole batch is theirs in any split
    fast_and_slow(shares)
    assert shares.draw(64)[0] >= 46


def test_a_batch_that_fits_no_more_by_what_others_take_goes_on_as_it_fitted() -> None:
    shares = Shares("hybrid", 2, 64)
    learned(shares, (1, 32, -1, -20), (2, 32, -1, -20))
    assert shares.draw(64) == [32, 32]


def test_caps_that_cannot_hold_the_batch_say_by_how_much_and_what_would_fit() -> None:
    shares = Shares("hybrid", 2, 64)
    with pytest.raises(EvenstepError) as told:
        learned(shares, (1, 32, 10, None), (1, 32, 12, None))
    assert "memory does not hold the global batch (rank 0 10, rank 1 12 samples)" in str(told.value)
    assert "42 fewer than the batch of 64" in str(told.value)
    assert "accumulate over 4 batches of 16 samples" in str(told.value)
    assert shares.draw(64) == [32, 32]
    with pytest.raises(EvenstepError, match="accumulate over 3 batches of up to 23 samples"):
        Shares("hybrid", 2, 67, caps=[20, 3])
    with pytest.raises(EvenstepError, match="accumulate over 64 batches of 1 samples"):
        Shares("hybrid", 2, 64, caps=[1, 0])


def test_caps_of_the_script_and_learned_ones_hold_together() -> None:
    shares = Shares("equal", 3, 60, caps=[None, 10, None])
    assert shares.draw(60) == [25, 10, 25]
    learned(shares, (1, 25, -1, 100), (2, 10, -1, 50), (3, 25, -1, -5))
    assert shares.draw(60) == [30, 10, 20]
    assert shares.split(600) == [300, 100, 200]  # evaluation needs no memory for backward: nothing is refused
    assert shares.draw(6) == [2, 2, 2]
    again = Shares("equal", 3, 60, caps=[None, 10, None])
    again.learn_caps(shares.caps)  # from a checkpoint
    assert again.draw(60) == [30, 10, 20]
    assert shares.draw(170) == [96, 10, 64]  # a larger batch of the script's own: learned caps do not refuse it


def test_a_share_of_one_sample_goes_where_it_fits() -> None:
    assert none_alone([9, 1, 6], [9, None, 8]) == [9, 0, 7]
    assert none_alone([9, 1, 6], [9, None, 6]) == [9, 1, 6]
    assert none_alone([9, 1, 6]) == [10, 0, 6]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(-1, 40), st.none() | st.integers(-30, 60)), min_size=3, max_size=3
    )
)
def test_caps_of_the_extension_are_within_every_limit(told: list[tuple[int, int, int | None]]) -> None:
    had, wanted = [20, 20, 24], [10, 30, 24]
    reports = [(pool, samples, cap, room) for samples, (pool, cap, room) in zip(had, told)]
    caps = _core.memory_caps(reports, 64, wanted)
    assert len(caps) == len(told)
    for (_, cap, _), most in zip(told, caps):
        assert cap < 0 or 0 <= most <= cap
    for pool in {pool for pool, _, _ in told}:
        members = [rank for rank in range(3) if told[rank][0] == pool]
        rooms = [room for rank in members if (room := told[rank][2]) is not None]
        holds = max(0, sum(had[rank] for rank in members) + max(rooms)) if rooms else None
        if holds is not None and holds < 64:
            assert sum(caps[rank] for rank in members) <= holds
    with pytest.raises(ValueError, match="wants"):
        _core.memory_caps([(1, 2, 3)], 64, [1])  # type: ignore[list-item]


def test_the_limit_of_the_environment_is_read() -> None:
    sizes = {"12G": 12 << 30, "512M": 512 << 20, "1.5GiB": 3 << 29, "1073741824": 1 << 30, "4kb": 4096, "": None}
    for text, size in sizes.items():
        assert read_environment({"EVENSTEP_MEMORY_LIMIT": text}).memory_limit == size
    for text in ("much", "-1", "0", "12X", "nan", "inf", "G"):
        with pytest.raises(EvenstepError, match="EVENSTEP_MEMORY_LIMIT is"):
            read_environment({"EVENSTEP_MEMORY_LIMIT": text})


SCRIPT = (
    """
import os
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenstep as es
from evenstep import _core

rank = int(os.environ["RANK"])
options = {}
if "most" in sys.argv and rank == 1:
    options["most_samples"] = 5
if "nobody" in sys.argv:
    options["most_samples"] = 3
if "word" in sys.argv:
    options["most_samples"] = "5"
if "adapt" in sys.argv:
    least = 16 if "least" in sys.argv else None
    options["adapt_batch"] = es.AdaptBatch(most=16, lr_rule="linear", least=least)
class Wide(nn.Module):  # some 6 MB a sample at its peak
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 2**19))

    def forward(self, x):
        return torch.tanh(x * self.weight).mean(1, keepdim=True)


torch.optim.SGD([model := Wide().weight], lr=0.0)  # what is held whatever the share
Wide()(torch.ones(1, 1)).mean().backward()
held = _core.Memory().read()[0]
if ("limit" in sys.argv and rank == 1) or "both" in sys.argv:
    room = 56 if "adapt" in sys.argv else 48 if "both" in sys.argv else 40  # MB; what is imported meanwhile takes a third
    os.environ["EVENSTEP_MEMORY_LIMIT"] = str(held + room * 2**20)


"""
    + EVENTS
    + """

model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
count = 112 if "limit" in sys.argv else 64
data = TensorDataset(torch.randn(count, 1), torch.randn(count, 1))
session = es.session()
session.telemetry = Events(session.telemetry)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=16), policy="equal", **options)
for x, y in loader:
    shares = list(session.latest.shares)
    assert len(x) == max(1, shares[es.rank()])
    assert loader.shares.short is not None or all(
        cap < 0 or share <= cap for share, cap in zip(shares, loader.shares.caps)
    )
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
told = [one[1:] for one in session.telemetry.told if one[0] == _core.EVENT_MEMORY]
print(shares, loader.shares.caps, told, sep=chr(10))
print("BATCH", loader.batch_size, session.rates.factor)
if "most" in sys.argv:
    other = es.prepare(loader=DataLoader(data, batch_size=17), bucket=6 if rank == 0 else None, policy="hybrid")
    print(other.shares.draw(17))

"""
)


def test_a_limited_rank_gets_what_fits_and_all_ranks_know(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = (rank.stdout.splitlines() for rank in run_ranks(SCRIPT, args=["limit"]))
    assert first[:2] == second[:2]
    (_, share), caps = eval(first[0]), eval(first[1])
    assert share < 8 and caps[1] < 8 and caps[0] > 16, first
    assert first[2].endswith(f"(1, 'memory holds {caps[1]} of 8 samples on rank 1')]"), first
    assert second[2] == "[]"  # rank 0 tells of it, once


def test_a_batch_that_no_split_fits_ends_training_with_the_way_out(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["both"], check=False):
        assert rank.returncode != 0
        assert "memory does not hold the global batch (rank 0 " in rank.stderr
        assert "fix: use a global batch of at most" in rank.stderr and "accumulate over" in rank.stderr


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("both", 1), pytest.param("nobody", 2, marks=pytest.mark.more)],
)
def test_a_batch_that_may_shrink_becomes_what_memory_holds(
    run_ranks: Callable[..., list[Any]], words: str, ranks: int
) -> None:
    told = run_ranks(SCRIPT, args=[words, "adapt"], ranks=ranks)
    sizes = [one.stdout.partition("BATCH ")[2].split() for one in told]
    batch, factor = int(sizes[0][0]), float(sizes[0][1])
    assert sizes == [sizes[0]] * ranks and ranks <= batch < 16 and factor == batch / 16, sizes
    words_of_change = f"-> {batch} samples: memory holds {batch}; learning rate x {factor:.3g} (linear)\n"
    assert words_of_change in told[0].stderr
    assert "global batch" not in "".join(one.stderr for one in told[1:])
    assert batch == 6 or words != "nobody"


@pytest.mark.more
def test_a_batch_that_may_not_shrink_so_far(run_ranks: Callable[..., list[Any]]) -> None:
    for rank in run_ranks(SCRIPT, args=["nobody", "adapt", "least"], check=False):
        error = "holds 6 samples, 10 fewer than the global batch of 16, and fewer than"
        assert rank.returncode != 0 and error in rank.stderr, rank.stderr


def test_the_script_says_what_a_rank_holds(run_ranks: Callable[..., list[Any]]) -> None:
    """And how many its kernels work on at once."""
    told = [rank.stdout.splitlines() for rank in run_ranks(SCRIPT, args=["most"])]
    assert {(one[0], one[-1]) for one in told} == {("[11, 5]", "[6, 11]")}
    for words, error in (
        ("nobody", "the caps of all ranks hold 6 samples, 10 fewer than the batch of 16"),
        ("word", "es.prepare(most_samples='5'): give a whole number"),
    ):
        for rank in run_ranks(SCRIPT, args=[words], check=False):
            assert rank.returncode != 0 and error in rank.stderr, rank.stderr


def test_several_named_ranks_fit_an_event() -> None:
    shares = Shares("equal", 8, 8000)
    reports = [(rank, 1000, 100 * rank if rank % 2 else -1, None) for rank in range(8)]
    news = shares.take_memory(reports)
    assert news is not None and news[0] == 4 and len(news[1]) < 100 and news[1].endswith("and 1 more"), news


def test_pairs_of_reports_are_the_same_on_every_rank() -> None:
    """What one balancer makes of the reports, another does: also where they come in the middle of trials."""
    one, other = Shares("auto", 2, 64, speeds=[2.0, 1.0]), Shares("auto", 2, 64, speeds=[2.0, 1.0])
    for step, shares in itertools.product(range(200), (one, other)):
        fast_and_slow(shares, steps=1)
        shares.take_memory([(1, 40, -1, step % 7 - 3), (2, 24, -1, 50 - step % 11)])
        if shares is other:
            assert one.draw(64) == other.draw(64)
