"""The bench's hold on the cores' sleep: what is written where, for how long, and what is said where it may not."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from evenstep.bench_awake import awake


def held(path: Path) -> bool:
    """Whether this process has the file open."""
    return any(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))


def test_a_bound_of_zero_is_held_for_as_long_as_the_bench_runs(tmp_path: Path) -> None:
    file = tmp_path / "cpu_dma_latency"
    file.touch()
    with awake(str(file)) as said:
        assert said == "are kept awake"
        assert struct.unpack("=i", file.read_bytes()) == (0,)
        assert held(file)
    assert not held(file)


def test_it_says_why_cores_may_sleep(tmp_path: Path) -> None:
    with awake(str(tmp_path / "none")) as said:
        assert said == f"may sleep (No such file or directory: {tmp_path / 'none'})"
    with awake("/dev/full") as said:  # opened, and takes no word
        assert said == "may sleep (No space left on device: /dev/full)"
    assert not held(Path("/dev/full"))


def test_an_error_inside_is_the_callers(tmp_path: Path) -> None:
    file = tmp_path / "cpu_dma_latency"
    file.touch()
    try:
        with awake(str(file)):
            raise KeyError("theirs")
    except KeyError as error:
        assert error.args == ("theirs",)
    assert not held(file)
