"""`evenstep run --recovery`: a rank that ends by an error of its place (a device, a driver, a disk) is a lost rank."""

from __future__ import annotations

import re
from typing import Callable

import generation_cases as cases
import pytest
from run_jobs import Run

Script = Callable[[str], str]
WORDS = ("--no-pin", "--no-monitor", "--log-rank", "all", "--recovery")
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def raising(source: str, error: str) -> str:
    """The ranks raise where they would be killed."""
    assert "os.kill(os.getpid(), 9)" in source
    return source.replace("os.kill(os.getpid(), 9)", f"raise {error}")


@pytest.mark.parametrize(
    "error",
    [
        f"RuntimeError('{ILLEGAL}')",
        pytest.param("OSError(5, 'Input/output error')", marks=pytest.mark.more),
        pytest.param("torch.OutOfMemoryError('CUDA out of memory.')", marks=pytest.mark.more),
    ],
)
def test_a_spare_takes_its_place(run: Run, script: Script, error: str) -> None:
    source = raising(cases.REPLACED, error)
    result = run("-n", "2", "--spares", "1", *WORDS, "replace", script(source), "1@forward:3", "3")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert re.search(rf"rank 1 \(cpu:\d+ on .*\) exited with code 1: {error[:5]}.* \(\S+:\d+, in here\)", text), text
    assert "generation 1: rank 0 goes on without rank 1" in text and "restart" not in text, text
    assert len(re.findall(r"rank \d of 2 at step 18: \S+e-1\d apart, rate kept", text)) == 2, text


@pytest.mark.more
def test_a_broken_device_rests(run: Run, script: Script) -> None:
    source = raising(cases.REPLACED, "RuntimeError('CUDA error: uncorrectable ECC error encountered')")
    result = run("-n", "2", "--spares", "1", *WORDS, "replace", script(source), "1@forward:3", "3")
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "restart" not in text, text
    assert re.search(r"rank 1 \(cpu:\d+\) is set aside for 10 s: by its error its device is at fault", text), text


@pytest.mark.more
def test_who_ends_so_after_it_in_the_same_step_shows_that_it_is_the_scripts(run: Run, script: Script) -> None:
    source = raising(cases.PLAIN_LOOP, f"RuntimeError('{ILLEGAL}')")
    result = run("-n", "3", "--max-restarts", "1", *WORDS, "shrink", script(source), "0@forward:3,1@forward:3")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text  # no more deaths in the second attempt
    assert re.search(r"rank \d has ended like one before it, and no step was made between", text), text
    assert "restart 1 of 1" in text, text


@pytest.mark.more
def test_an_error_of_the_scripts_ends_the_job_as_ever(run: Run, script: Script) -> None:
    source = raising(cases.PLAIN_LOOP, "ValueError('a bad sample')")
    result = run("-n", "2", *WORDS, "shrink", script(source), "1@forward:3")
    text = result.stdout + result.stderr
    assert result.returncode == 1 and "generation 1:" not in text and "an error of its own" in text, text
