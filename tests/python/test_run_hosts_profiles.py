"""Jobs of several hosts begin with shares by each host's own gpu_profiles.json."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from test_run_hosts import Hosts, Script
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture


def _profile(path: pathlib.Path, products: float, measured_with: str = "torch 2.13.0") -> None:
    """Of all cores, as if each had so many GFLOP/s."""
    devices = [
        {
            "name": f"cpu:{number}",
            "cpus": [cpu],
            "relative_score": 1,
            "matmul_fp32_gflops": products,
            "memory_bandwidth_gb_per_second": 10,
        }
        for number, cpu in enumerate(sorted(os.sched_getaffinity(0)))
    ]
    content = {"format": "evenstep-profile-1", "measured_with": measured_with, "devices": devices}
    path.write_text(json.dumps(content))


@pytest.fixture
def over(tmp_path: pathlib.Path) -> str:
    """Before a command: gpu_profiles.json is another file there."""
    path = tmp_path / "over.sh"
    path.write_text('#!/bin/sh\nmount --bind other.json gpu_profiles.json && exec "$@"\n')
    path.chmod(0o755)
    return f"unshare -m {path}"


def test_each_hosts_own_profile_counts(hosts: Hosts, script: Script, tmp_path: pathlib.Path, over: str) -> None:
    """Both call their fastest device 1; speeds are the square root of products by bytes."""
    _profile(tmp_path / "gpu_profiles.json", 90)
    _profile(tmp_path / "other.json", 10)
    source = script("import os; print('speeds', os.environ.get('EVENSTEP_SPEEDS'))")
    words = ["--policy", "proportional", "--log-rank", "all"]
    cores = len(os.sched_getaffinity(0))
    code, said = hosts.run(*words, source, before=over)
    assert code == 0 and said.count(f"speeds {30 * cores},{10 * cores}") == 2, said
    code, said = hosts.run(*words, "--profile", "other.json", source)
    assert code == 0 and said.count(f"speeds {10 * cores},{10 * cores}") == 2, said


@pytest.mark.parametrize("there", ["nothing", "measured otherwise", "spoilt", "none at all"])
def test_where_one_hosts_profile_does_not_count_shares_are_equal(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, over: str, there: str
) -> None:
    none = there == "none at all"
    if not none:
        _profile(tmp_path / "gpu_profiles.json", 90)
    _profile(tmp_path / "other.json", 10, "C")
    if there != "measured otherwise":
        empty = '{"format": "evenstep-profile-1", "devices": []}'
        (tmp_path / "other.json").write_text("[]" if there == "spoilt" else empty)
    source = script("import os; print('speeds', os.environ.get('EVENSTEP_SPEEDS'))")
    code, said = hosts.run("--policy", "proportional", source, before="" if none else over)
    assert code == 0 and "speeds None" in said, said
    lacks = f"{'there is none' if none else 'none tells of all devices'}: shares are equal, and stay so; "
    assert said.count(f"{lacks}`evenstep profile` on each host makes one") == 1
    unknown = f"gpu_profiles.json of host {hosts.names[1]} has no score that holds for cpu"
    assert said.count(unknown) == (0 if none else 1)
    spoilt = f"host {hosts.names[1]}: gpu_profiles.json is not a profile: its format is missing"
    assert said.count(spoilt) == (1 if there == "spoilt" else 0)
