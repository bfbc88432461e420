"""What the program prints: a reader that pauses never stops a job, and what others wrote commands no terminal."""

from __future__ import annotations

import ctypes
import os
import pathlib
import select
import signal
import subprocess
from collections.abc import Iterator

import pytest
from run_jobs import Job

# Prints more than a pipe and the view hold together, tells so, and goes on until it is told to end.
PRINTS_ON = """
    import os, signal, sys
    for line in range(30000):
        print(f"line {line} " + "x" * 90)
    sys.stdout.flush()
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with open("told", "w") as told:
        told.write("printed")
    while True:
        signal.pause()
"""


@pytest.fixture
def told(tmp_path: pathlib.Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "told")
    end = os.open(tmp_path / "told", os.O_RDWR | os.O_NONBLOCK)
    yield end
    os.close(end)


def wait_printed(told: int) -> None:
    ready, _, _ = select.select([told], [], [], 150)
    assert ready, "the rank stands still: nobody takes its output"
    assert os.read(told, 100) == b"printed"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 0), (signal.SIGUSR2, 137)],
)
def test_nothing_waits_for_a_reader_that_pauses(start, script, told: int, number: int, code: int) -> None:
    job: Job = start("-n", "1", "--max-restarts", "0", script(PRINTS_ON))
    wait_printed(told)
    job.process.send_signal(number)  # to the user's end, to a good one and to the death of the rank
    try:
        assert job.process.wait(timeout=150) == code
    except subprocess.TimeoutExpired:
        pytest.fail("the agent stands in a write to its reader")


def test_a_reader_that_goes_on_is_told_what_it_missed(start, script, told: int, tmp_path: pathlib.Path) -> None:
    job: Job = start("-n", "1", "--name", "late", script(PRINTS_ON))
    wait_printed(told)
    job.wait_for(r"(\d+) lines are left out")
    job.process.send_signal(signal.SIGUSR1)
    code, text = job.finish()
    missed = int(text.partition(" lines are left out")[0].rpartition(" ")[2])
    printed = [line for line in text.splitlines() if line.startswith("line ")]
    assert code == 0 and "runs/late/logs" in text
    assert missed > 0 and missed + len(printed) == 30000  # every line is printed whole, or counted
    assert all(len(line) > 90 for line in printed)
    assert text.rstrip().splitlines()[-1].startswith("evenstep: late ended well")
    log = (tmp_path / "runs/late/logs/rank-0.log").read_text()
    assert log.count("\nline ") == 30000


def test_a_reader_that_keeps_up_misses_nothing(start, script) -> None:
    name = script("""
        for line in range(40000):
            print(f"line {line} " + "x" * 90)
    """)
    job: Job = start("-n", "1", name)
    code, text = job.finish(timeout=150)
    assert code == 0 and "left out" not in text
    assert sum(line.startswith("line ") for line in text.splitlines()) == 40000


def test_the_end_is_told_when_the_reader_goes_on_in_time(start, script, told: int) -> None:
    job: Job = start("-n", "1", script(PRINTS_ON))
    wait_printed(told)
    job.process.send_signal(signal.SIGUSR1)
    code, text = job.finish()
    assert code == 0 and "left out" in text
    assert "ended well" in text.rstrip().splitlines()[-1]


def test_a_checkpoint_commands_no_terminal(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from evenstep import _core

    content = ctypes.create_string_buffer(64)
    writer = _core.CheckpointWriter(tmp_path / "one", True, 0)
    writer.add("model.safetensors", [("w\x1b]52;c;eA==\x07\x9b2J", "U8", (64,), ctypes.addressof(content), 64)])
    writer.commit('{"step": 7, "epoch": 0, "world_size": 1}')
    shown = subprocess.run([program, "ckpt", "show", tmp_path / "one"], capture_output=True, timeout=150, check=True)
    assert b"w?]52;c;eA==??2J\n" in shown.stdout
