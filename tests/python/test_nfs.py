"""Checkpoints on a real NFS, in a Linux that runs as a process (scripts/nfs_guest.sh): nfs_cases.py there."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest
from run_jobs import go_without

MISSING = 77  # as the script ends where it has no packages


@pytest.mark.more
@pytest.mark.timeout(2400)
def test_two_hosts_on_a_real_nfs(tree: pathlib.Path, program: pathlib.Path) -> None:
    words = [tree / "scripts" / "nfs_guest.sh"]
    environment = {**os.environ, "EVENSTEP_PROGRAM": str(program)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", timeout=2300)
    if done.returncode == MISSING:
        go_without("nfs", done.stderr.strip())
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout[-5000:]
