"""`evenstep run --cpu-quota`: ranks slowed down truly."""

from __future__ import annotations

import re

import pytest
from run_jobs import Run


def test_quota_slows_a_rank_down(run: Run, script) -> None:
    # CPU time, not wall time: what the kernel gave, whatever else the machine does
    name = script("""
        import os, time
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass
        print("share", os.environ["RANK"], time.process_time())
    """)
    result = run("--devices", "cpu:0", "--cpu-quota", "0:0.25", name)
    assert result.returncode == 0, result.stderr
    if "busy neighbours" in result.stderr:
        pytest.skip("no CPU quota is permitted here; the neighbours' effect depends on the scheduler")
    assert float(re.findall(r"share 0 ([\d.]+)", result.stdout)[0]) < 0.5
