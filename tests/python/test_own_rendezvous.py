"""A rank is stopped, killed or gone before the script's own `init_process_group`, in which the others wait for it."""

from __future__ import annotations

import re
from typing import Callable

import pytest
from run_jobs import Run
from test_generations import SHRINK
from test_replacement import REPLACE

Script = Callable[[str], str]

# What the rank in sys.argv[1] does once all others wait: it stands still for good ("stop") or until it was seen to ("pause"), is
# killed, leaves, or takes its time ("slow").
WAITED_FOR = """
import os, signal, subprocess, sys, time
import torch.distributed as dist
import evenstep as es
from evenstep import _core

one, what, backend = sys.argv[1:4]
rank, ranks, first = os.environ["RANK"], int(os.environ["WORLD_SIZE"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def until_all_others_wait():
    ring, waiting = _core.TelemetryReader(int(os.environ["EVENSTEP_TELEMETRY_FD"])), set()
    while len(waiting) < ranks - 1:
        records, _ = ring.drain()
        waiting |= {record[1] for record in records if record[0] == "event" and record[2] == _core.EVENT_OPENING}
        time.sleep(0.005)


if rank == one and first:
    until_all_others_wait()
    if what == "pause":
        again = f"until grep -q '^State:.*stopped' /proc/{os.getpid()}/status; do :; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", again], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if what in ("stop", "pause"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        raise SystemExit(0)
dist.init_process_group(backend)
dist.barrier()
print("met", flush=True)
dist.destroy_process_group()
"""


def _more(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("one", "backend", "options"),
    [
        ("1", "gloo", ("--log-rank", "all")),
        ("0", "evenstep", SHRINK),  # the others reach no store yet
        ("2", "evenstep", REPLACE),
        _more("1", "gloo", REPLACE),
        _more("2", "evenstep", ("--log-rank", "all")),
    ],
)
def test_one_that_is_stopped_is_ended_and_the_job_starts_again(
    run: Run, script: Script, one: str, backend: str, options: tuple[str, ...]
) -> None:
    result = run("-n", "3", *options, script(WAITED_FOR), one, "stop", backend)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert f"rank {one} still stands, and the others wait for all ranks to come together: it is ended" in text, text
    process = re.search(rf"rank {one} \(cpu:\d on \S+, process (\d+)\) was stopped \(SIGSTOP, SIGTSTP\)", text)
    assert process is not None and f"`kill -CONT {process[1]}` would have let it go on" in text, text
    assert text.count("restart 1 of 3 from the beginning") == 1 and text.count("] met") == 3, text


def test_without_restarts_the_job_ends_and_names_it(run: Run, script: Script) -> None:
    result = run("-n", "2", "--max-restarts", "0", script(WAITED_FOR), "1", "stop", "gloo")
    assert result.returncode == 7, result.stdout + result.stderr
    assert re.search(r"rank 1 \(cpu:\d on \S+, process \d+\) was stopped", result.stderr), result.stderr
    assert "rank 0" not in result.stderr, result.stderr


@pytest.mark.parametrize("backend", ["gloo", "evenstep"])
def test_one_that_goes_on_in_time_is_waited_for(run: Run, script: Script, backend: str) -> None:
    patience = {"EVENSTEP_STOP_PATIENCE": "120"}
    result = run("-n", "2", "--log-rank", "all", script(WAITED_FOR), "1", "pause", backend, env=patience)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and text.count("] met") == 2 and "restart 1" not in text, text


@pytest.mark.parametrize("one", ["1", _more("0")])
def test_one_that_is_killed_starts_the_job_again(run: Run, script: Script, one: str) -> None:
    result = run("-n", "3", *SHRINK, script(WAITED_FOR), one, "kill", "gloo")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert re.search(rf"rank {one} \(cpu:\d on \S+, process \d+\) was killed by SIGKILL", text), text
    assert text.count("restart 1 of 3 from the beginning") == 1 and text.count("] met") == 3, text


def test_one_that_ends_well_without_it_is_named(run: Run, script: Script) -> None:
    result = run("-n", "2", script(WAITED_FOR), "1", "leave", "gloo")
    assert result.returncode == 7, result.stdout + result.stderr
    words = "ended with code 0 without init_process_group, where the other ranks wait for it: let every rank call"
    assert re.search(rf"rank 1 \(cpu:\d on \S+, process \d+\) {words}", result.stderr), result.stderr
