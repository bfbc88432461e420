"""CPU quotas of control groups, and busy seconds under them: a rank that waits for others in every step goes on at full speed for a
period's time, and is no faster on the whole. All times are given, and so long that those of the test itself count for nothing."""

from __future__ import annotations

import math
from pathlib import Path

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
    assert quota.cores == 0.25
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "50000 100000\n")  # at once
    assert quota.look() == 0.5 and quota.cores == 0.5
    put(tmp_path, "sys/fs/cgroup/outer/inner/cpu.max", "40000 100000\n")  # else within eight steps
    assert min(quota.cores for _ in range(8)) == 0.4
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "10000 100000\n")  # of a group above: within 64 steps
    assert min(quota.cores for _ in range(64)) == 0.1
    (tmp_path / "sys/fs/cgroup/outer/inner/cpu.max").unlink()
    put(tmp_path, "sys/fs/cgroup/outer/cpu.max", "nonsense\n")
    assert [quota.cores for _ in range(64)][-1] == math.inf
    assert CpuQuota(str(tmp_path / "nowhere")).cores == math.inf


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
