"""How the bench makes ranks slower: quotas of control groups, and neighbours on the same core."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

from evenstep.bench_slowing import LIGHTER, WHOLE, Neighbours, Quota, nearest_lighter, own_group


def test_neighbours_take_their_part_and_are_gone_at_the_end():
    # CPU time of this thread of the wall time while its neighbours run: what the scheduler gave, whatever else runs
    source = """
        import os, time
        from evenstep.bench_slowing import Neighbours

        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        neighbours = Neighbours()
        neighbours.hold(0.25)
        began, used = time.perf_counter(), time.thread_time()
        while time.thread_time() - used < 0.05:
            pass
        part = (time.thread_time() - used) / (time.perf_counter() - began)
        print(len(neighbours._busy), part < 0.6)
        neighbours.hold(0.5)
        print(len(neighbours._busy))
        neighbours.close()
        print(len(neighbours._busy))
    """
    words = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout.split() == ["3", "True", "1", "0"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_written_as_the_kernel_takes_it(tmp_path, version):
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    folder = tmp_path / "sys" / "group" / "evenstep-job-rank-1"
    folder.mkdir(parents=True)
    if version == 1:
        (proc / "cgroup").write_text("3:cpuacct:/\n2:cpu:/evenstep-job-rank-1\n0::/\n")
        (proc / "mountinfo").write_text("36 35 0:1 / /sys/group rw,relatime - cgroup cgroup rw,cpu\n")
        (folder / "cpu.cfs_quota_us").write_text("9990\n")
    else:
        (proc / "cgroup").write_text("0::/mine/evenstep-job-rank-1\n")
        (proc / "mountinfo").write_text("36 35 0:1 /mine /sys/group rw shared:1 - cgroup2 cgroup2 rw\n")
        (folder / "cpu.max").write_text("9990 10000\n")
    assert own_group(str(tmp_path)) == (folder, version)
    quota = Quota(str(tmp_path))
    quota._cores = 1
    for part, wanted in ((0.25, "2500 10000"), (1 / 16, "1000 16000"), (1.0, "9990 10000")):
        quota.hold(part)
        if version == 1:
            files = [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
            assert " ".join(files) == wanted
        else:
            assert (folder / "cpu.max").read_text().strip() == wanted


def test_no_quota_is_set_in_a_group_of_others(tmp_path):
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/users\n")
    (proc / "mountinfo").write_text("36 35 0:1 / /sys/group rw - cgroup2 cgroup2 rw\n")
    folder = tmp_path / "sys" / "group" / "users"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("max 100000\n")
    with pytest.raises(Exception, match="which Evenstep has not made"):
        Quota(str(tmp_path))
    assert (folder / "cpu.max").read_text() == "max 100000\n"


def test_neighbours_of_a_part_that_is_whole_are_none():
    neighbours = Neighbours()
    neighbours.hold(1.0)
    assert neighbours._busy == []


def test_a_neighbour_of_a_part_that_is_between_has_a_lighter_weight():
    neighbours, cpus = Neighbours(), len(os.sched_getaffinity(0))
    try:
        for part, whole, nice in ((0.667, 0, 3), (0.4, 1, 3), (0.8, 0, 6), (0.5, 1, 0), (0.99, 0, 0)):
            neighbours.hold(part)
            assert (len(neighbours._busy), neighbours._running) == (whole * cpus, nice)
            for kind, light in neighbours._light.items():
                for one in light:
                    _becomes(one.pid, "R" if kind == nice else "T")
            has = 1 / (1 + whole + LIGHTER.get(nice, 0) / WHOLE)
            assert has == pytest.approx(part, rel=0.02)
    finally:
        neighbours.close()
    assert neighbours._busy == [] and neighbours._light == {}
    assert nearest_lighter(0.0) == 0 and nearest_lighter(0.8) == 1


def _becomes(pid: int, state: str) -> None:
    """The kernel stops a process when it next comes by."""
    until = time.monotonic() + 150
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != state:
        assert time.monotonic() < until
