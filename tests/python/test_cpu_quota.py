"""CPU quotas of control groups, and busy seconds under them: a rank that waits for others in every step goes on at full speed for a
period's time, and is no faster on the whole. All times are given, and so long that those of the test itself count for nothing."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenstep import _core
from evenstep.cpu_quota import CpuQuota, allowed
from evenstep.step_times import StepTimes

SECOND = 1_000_000_000


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    assert allowed(str(tmp_path)) == math.inf
    put(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n")
    assert allowed(str(tmp_path)) == 1.5
    put(tmp_path, "proc/self/cgroup", "4:memory:/\n3:cpu,cpuacct:/ranks\n")
    put(tmp_path, "sys/fs/cgroup/cpu/ranks/cpu.cfs_quota_us", "2500\n")
    put(tmp_path, "sys/fs/cgroup/cpu/ranks/cpu.cfs_period_us", "10000\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    put(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert allowed(str(tmp_path)) == 0.25


def test_a_quota_that_changes_is_seen(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "max 100000\n")
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "25000 100000\n")
    quota = CpuQuota(str(tmp_path))
    assert quota.bound == (0.25, 100_000_000)
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "10000 20000\n")  # at once, with its period
    assert quota.look() == (0.5, 20_000_000) and quota.bound.cores == 0.5
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "40000 100000\n")  # else within eight steps
    assert min(quota.bound.cores for _ in range(8)) == 0.4
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "10000 100000\n")  # of a group above: within 64 steps
    assert min(quota.bound.cores for _ in range(64)) == 0.1
    (tmp_path / "sys/fs/cgroup/outer/inner/cpu.max").unlink()
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "nonsense\n")
    assert [quota.bound.cores for _ in range(64)][-1] == math.inf
    assert CpuQuota(str(tmp_path / "nowhere")).bound.cores == math.inf


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_above_that_is_lifted_is_seen_at_once(tmp_path: Path, version: int) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/pod/own\n" if version == 2 else "3:cpu,cpuacct:/pod/own\n")

    def pod(quota: str) -> None:
        if version == 2:
            put(tmp_path, "sys/fs/cgroup/pod/cpu.max", f"{quota.replace('-1', 'max')} 100000\n")
        else:
            put(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", f"{quota}\n")
            put(tmp_path, "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n")

    put(tmp_path, "sys/fs/cgroup/pod/own/cpu.max", "max 100000\n")
    pod("25000")
    quota = CpuQuota(str(tmp_path))
    assert quota.bound == quota.look() == (0.25, 100_000_000)
    pod("-1")
    assert quota.look().cores == math.inf


def test_files_of_groups_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/ranks\n")
    put(tmp_path, "sys/fs/cgroup/cpu/ranks/cpu.cfs_quota_us", "25000\n")
    put(tmp_path, "sys/fs/cgroup/cpu/ranks/cpu.cfs_period_us", "100000\n")
    quota = CpuQuota(str(tmp_path))
    opened: list[str] = []
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given[0]))
    for _ in range(60):
        assert quota.look().cores == quota.bound.cores == 0.25
    assert not opened


def test_a_group_may_have_any_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xe4nge")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/r\xe4nge\n")
    put(tmp_path, f"sys/fs/cgroup/{name}/cpu.max", "25000 100000\n")
    assert allowed(str(tmp_path)) == 0.25


class Rank:
    """Of a quarter of a core, whose steps take what they are said to."""

    def __init__(self, root: Path, cores: str = "25000") -> None:
        put(root, "proc/self/cgroup", "0::/\n")
        put(root, "sys/fs/cgroup/cpu.max", f"{cores} 100000\n")
        self.root, self.used, self.waited = root, 0.0, 0.0
        quota = CpuQuota(str(root), lambda: int(self.used * SECOND))
        self.times = StepTimes(_core.Telemetry(-1, 0), lambda: int(self.waited * SECOND), quota)

    def busy(self, wall: float, used: float, before: float = 0.0, waited: float = 0.0) -> float:
        """Of a step whose work takes so many seconds by the clock and of the CPU, after others were waited for `before` it; `waited`
        of its own time for others within it."""
        now = _core.clock_ns()
        self.times.synchronised(0, now - int(before * SECOND))
        self.times.committed(batches=1)
        self.used, self.waited = self.used + used, self.waited + waited
        return self.times.busy_until(_core.clock_ns() + int(wall * SECOND)) / SECOND


@pytest.mark.parametrize(
    ("wall", "used", "before", "waited", "busy"),
    [
        (1500, 375, 500, 0, 1500),  # stopped for as long as the quota says
        (1500, 475, 500, 0, 1900),  # it had a period's time left: as if it had not waited
        (1500, 300, 500, 0, 1500),  # it was kept from its core by others, too
        (1500, 600, 500, 0, 2000),  # no longer than the whole step
        (1500, 475, 500, 200, 1300),  # 200 of them may have been polled away: 1100 are sure, 1300 were seen
    ],
)
def test_a_step_is_as_long_as_its_quota_makes_it(
    tmp_path: Path, wall: float, used: float, before: float, waited: float, busy: float
) -> None:
    assert Rank(tmp_path).busy(wall, used, before, waited) == pytest.approx(busy, abs=5)


def test_without_a_quota_the_clock_counts(tmp_path: Path) -> None:
    assert Rank(tmp_path, "max").busy(1500, 6000, 500) == pytest.approx(1500, abs=5)
    assert Rank(tmp_path, "800000").busy(1500, 6000, 500) == pytest.approx(1500, abs=5)  # eight cores, four busy


def test_each_step_counts_its_own_cpu_time(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert rank.busy(1500, 475, 500) == pytest.approx(1900, abs=5)
    assert rank.busy(1500, 475, 500) == pytest.approx(1900, abs=5)
    rank.used += 9000  # of something that is no step
    rank.times.begin_anew()
    rank.used += 300
    assert rank.times.busy_until(_core.clock_ns() + 2000 * SECOND) / SECOND == pytest.approx(2000, abs=5)


# -- with a clock that is told the time --


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_core, "clock_ns", lambda: round(self.now * SECOND))

    def at(self, seconds: float) -> int:
        """What the clock says then."""
        self.now = seconds
        return _core.clock_ns()


class Timed(Rank):
    def __init__(self, root: Path, clock: Clock, cores: str = "25000") -> None:
        self.clock = clock
        super().__init__(root, cores)
        self.times.unpause()
        self.times.begin_anew()

    def step(self, work: float, used: float, wait: float, exchange: float, exchange_used: float = 0.0) -> float:
        """Its busy seconds; others are waited for, and all exchange."""
        self.used += used
        end = self.clock.at(self.clock.now + work)
        busy = self.times.busy_until(end) / SECOND
        self.clock.at(self.clock.now + wait)
        self.times.meets_to_exchange()
        self.used += exchange_used
        self.clock.at(self.clock.now + exchange)
        self.times.synchronised(0, end)
        self.times.committed(batches=1)
        return busy


@pytest.mark.parametrize(
    ("exchange", "exchange_used", "used", "busy"),
    [
        (0.0, 0.0, 0.030, 0.120),
        (0.04, 0.0, 0.030, 0.080),  # the quota gave it 10 ms while all exchanged
        (0.04, 0.006, 0.030, 0.104),  # 24 of these 40 ms went to the exchange itself
        (0.04, 0.040, 0.030, 0.120),
        (0.3, 0.0, 0.045, 0.080),  # no more than a period's time
        (0.04, 0.0, 0.2, 0.160),  # not longer than the step beside the exchange: 110 ms of waiting, and 50
    ],
)
def test_an_exchange_gives_a_rank_time_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: float, exchange_used: float, used: float, busy: float
) -> None:
    rank = Timed(tmp_path, Clock(monkeypatch))
    rank.step(0.05, 0.01, 0.11, exchange, exchange_used)
    assert rank.step(0.05, used, 0.11, exchange) == pytest.approx(busy, abs=1e-6)
    rank.times.begin_anew()
    assert rank.step(0.05, used, 0.11, 0.0) == pytest.approx(0.05, abs=1e-6)  # what was before is forgotten


@pytest.mark.parametrize("how", ["apart", "pause"])
@pytest.mark.parametrize("blocked", [0.0, 0.2])
def test_cpu_time_beside_training_is_none_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, blocked: float
) -> None:
    """With several threads evaluation uses more CPU time than it lasts."""
    clock = Clock(monkeypatch)
    rank = Timed(tmp_path, clock, "400000")
    rank.step(0.01, 0.04, 0.5, 0.0)
    mark = rank.times.mark()
    if how == "pause":
        rank.times.pause()
    rank.used += 4 * 0.3
    rank.waited += blocked
    clock.at(clock.now + 0.3 + blocked)
    if how == "pause":
        rank.times.unpause()
    else:
        rank.times.apart_since(mark)
    assert rank.step(0.01, 0.08, 0.5, 0.0) == pytest.approx(0.02, abs=1e-6)  # by its quota
    rank.times.apart_since(rank.times.mark())
    assert rank.step(0.01, 0.04, 0.0, 0.0) == pytest.approx(0.01, abs=1e-6)


def test_a_step_lasted_no_longer_than_it_did_beside_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank = Timed(tmp_path, clock)
    rank.step(0.05, 0.01, 0.11, 0.0)
    mark = rank.times.mark()
    clock.at(clock.now + 3.0)
    rank.times.apart_since(mark)
    assert rank.step(0.05, 0.2, 0.0, 0.0) == pytest.approx(0.16, abs=1e-6)


def test_what_telemetry_is_told_is_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Timed(tmp_path, Clock(monkeypatch))
    rank.step(0.05, 0.01, 0.11, 0.0)
    assert rank.step(0.05, 0.030, 0.11, 0.0) == pytest.approx(0.12, abs=1e-6)
    assert rank.times.seen == pytest.approx(0.05 * SECOND, abs=1000)


class Job:
    """Two ranks, of which the second has a quota in periods of 100 ms, as the kernel's scheduler has it; steps are those of a model
    of three samples' fixed part, and end with an exchange in which nobody works."""

    PERIOD, BATCH = 0.1, 64

    def __init__(self, rank: Timed, quota: float, sample: float, exchange: float) -> None:
        self.rank, self.quota, self.sample, self.exchange = rank, quota, sample, exchange
        self.left, self.random = quota * self.PERIOD, random.Random(1)

    def _throttled(self, work: float) -> float:
        at = self.rank.clock.now
        while True:
            following = (math.floor(at / self.PERIOD + 1e-9) + 1) * self.PERIOD
            possible = min(self.left, following - at)
            if work <= possible:
                self.left -= work
                return at + work - self.rank.clock.now
            work, at, self.left = work - possible, following, self.quota * self.PERIOD

    def step(self, shares: list[int]) -> tuple[list[tuple[int, float]], float]:
        clock, began = self.rank.clock, self.rank.clock.now
        first, second = ((3 + max(1, share)) * self.sample * math.exp(self.random.gauss(0, 0.03)) for share in shares)
        work = self._throttled(second)
        busy = self.rank.step(work, second, max(0.0, first - work), self.exchange)
        if math.floor(clock.now / self.PERIOD + 1e-9) > math.floor((began + work) / self.PERIOD + 1e-9):
            self.left = self.quota * self.PERIOD
        return list(zip(shares, (first, busy))), clock.now - began


@pytest.mark.parametrize(
    ("quota", "sample", "exchange", "most"),
    [
        (0.5, 0.001, 0.04, 0.0785),  # 0.087 where the exchange counts for work; equal shares 0.0785
        (0.25, 0.0002, 0.02, 0.0285),
        (0.25, 0.001, 0.05, 0.0990),
        (0.25, 0.001, 0.01, 0.0655),
    ],
)
def test_a_rank_under_a_quota_does_with_an_exchange_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float, sample: float, exchange: float, most: float
) -> None:
    job = Job(Timed(tmp_path, Clock(monkeypatch), f"{quota * 100000:.0f}"), quota, sample, exchange)
    balancer = _core.Balancer("auto", 2, Job.BATCH)
    took = []
    for _ in range(800):
        timings, seconds = job.step(list(balancer.shares()))
        balancer.observe(timings)
        took.append(seconds)
    assert sum(took[400:]) / 400 < most


EXCHANGES = """
import torch
import evenstep as es
from evenstep.step_times import StepTimes
from evenstep.steps import Steps

order = []

def told(cls, name):
    inner = getattr(cls, name)
    def outer(self, *given):
        out = inner(self, *given)
        order.append(name)
        return out
    setattr(cls, name, outer)

for cls, name in ((Steps, "_exchange"), (StepTimes, "meets_to_exchange"), (StepTimes, "synchronised"), (StepTimes, "committed")):
    told(cls, name)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = es.prepare(model, optimizer)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert order[:4] == ["_exchange", "meets_to_exchange", "synchronised", "committed"], order
"""


def test_an_exchange_begins_with_the_vote_and_ends_with_whole_gradients(run_ranks: Callable[..., Any]) -> None:
    run_ranks(EXCHANGES, ranks=2)
