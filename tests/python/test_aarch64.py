"""The C core on aarch64, under an emulator: kernels of NEON, and collectives by them (`scripts/aarch64.sh`)."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

MISSING = 77  # as the script ends where it has no compiler, or no emulator
REQUIRED = "aarch64" in os.environ.get("EVENSTEP_TEST_REQUIRE", "").split(",")
KERNELS = ("comm_kernels", "comm_paths")


@pytest.mark.more
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tests of this machine are of another processor")
def test_the_c_core_runs_under_an_emulator(tree: pathlib.Path) -> None:
    done = subprocess.run([tree / "scripts" / "aarch64.sh"], capture_output=True, text=True, timeout=3500)
    if done.returncode == MISSING and not REQUIRED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    ran = re.findall(r"Test +#\d+: (\w+) \.+ +Passed", done.stdout)
    assert set(KERNELS) <= set(ran)
