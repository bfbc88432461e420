"""Ranks that really hang: found, told with their stacks, and ended where that was asked for."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sqlite3
from collections.abc import Callable

import pytest
from run_jobs import Job

TRAIN = """
    import ctypes, os, sys, threading, time
    import torch
    import evenstep as es

    where, rank = sys.argv[1], int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    done = 0

    def hangs(at):
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        return at == where and rank == 1 and first and (done == 5 or at in ("start", "worker"))

    def hang_in_a_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def hang_in_c():
        handle = os.open("hang.fifo", os.O_RDWR)
        assert ctypes.CDLL(None, use_errno=True).read(handle, ctypes.create_string_buffer(1), 1) == 1

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 160
        def __getitem__(self, index):
            if index > 80 and hangs("worker"):
                hang_in_a_lock()
            return torch.full((4,), float(index)), torch.ones(1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def forward(self, x):
            if hangs("lock"):
                hang_in_a_lock()
            if hangs("c"):
                hang_in_c()
            return self.layer(x)

    model = Model()
    if hangs("start"):
        hang_in_a_lock()
    loader = torch.utils.data.DataLoader(Data(), batch_size=16, num_workers=int(where == "worker"))
    model, optimizer, loader = es.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        done += 1
    print("rank", rank, "made", done, "steps", flush=True)
    if where == "c" and rank == 1:
        hang_in_c()  # until the agent has seen it go on
"""


@pytest.mark.parametrize(
    ("where", "phase", "line"),
    [
        ("lock", "compute (forward)", "in hang_in_a_lock"),
        pytest.param("worker", "data", "_try_get_data", marks=pytest.mark.more),
        pytest.param("start", "start (the script's own code)", "in hang_in_a_lock", marks=pytest.mark.more),
    ],
)
def test_a_hung_rank_is_ended_and_the_job_goes_on(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: pathlib.Path, where: str, phase: str, line: str
) -> None:
    seconds = "1" if where == "start" else "2"  # ten times that, before the first step
    words = ("-n", "2", "--name", "a", "--log-rank", "all", "--hang-timeout", seconds, "--on-hang", "restart")
    code, text = start(*words, "--max-restarts", "3", script(TRAIN), where).finish()
    assert code == 0, text
    told = next(one for one in text.splitlines() if " hangs: no progress for " in one)
    assert told.startswith("evenstep: rank 1 (cpu:1, process ") and f"s in {phase} (limit " in told, text
    assert "; 1 rank waits for it" in told
    assert "rank 0 (cpu:0, process " not in text  # who waits is not taken for hung
    assert re.search(r"evenstep: rank 1 \(cpu:1 on \S+, process \d+\) hung, and was ended for it: no progress", text)
    assert "restart 1 of 3 from the beginning" in text
    assert text.count("made 10 steps") == 2
    stacks = (tmp_path / "runs/a/logs/hang-rank-1.txt").read_text()
    assert line in stacks and line in text  # Python's
    if where == "lock":
        assert re.search(r"\nIts last collective, which is done: call \d+ \(\w+.*\) of a group of 2 ranks", stacks), (
            stacks
        )
    assert re.search(r"#\d+ +\S+\+0x[0-9a-f]+ \(libpython|#\d+ +PyThread|#\d+ +_PyEval|#\d+ +Py", stacks)  # and C's
    assert "in futex()" in stacks or "in poll()" in stacks or "not told" in stacks  # and the kernel's


# Nothing else of evenstep is used: that the others are in init_process_group is all that is known.
MEET = """
    import os, threading
    import torch.distributed as dist
    import evenstep

    def hang_in_a_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        hang_in_a_lock()
    dist.init_process_group("gloo")
    print("rank", os.environ["RANK"], "has met the others", flush=True)
"""


def test_a_rank_that_never_comes_to_init_process_group_is_ended(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    words = ("-n", "3", "--name", "a", "--log-rank", "all", "--hang-timeout", "0.5", "--on-hang", "restart")
    code, text = start(*words, "--recovery", "shrink", "--max-restarts", "1", script(MEET)).finish()
    assert code == 0 and text.count("has met the others") == 3, text
    told = next(one for one in text.splitlines() if " hangs: no progress for " in one)
    assert told.startswith("evenstep: rank 1 (cpu:") and "s in start (the script's own code) (limit 5 s" in told, text
    assert told.endswith("; 2 ranks wait for it in init_process_group"), text
    assert "the others cannot go on without the rank that hangs: rank " in text and "restart 1 of 1" in text
    assert "in hang_in_a_lock" in text  # Python's stack; C's in the file
    assert re.search(r"#\d+ +\S+\+0x[0-9a-f]+", (tmp_path / "runs/a/logs/hang-rank-1.txt").read_text())


def test_a_hang_in_c_is_told_and_not_disturbed(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    fifo = tmp_path / "hang.fifo"
    os.mkfifo(fifo)
    job = start("-n", "2", "--name", "a", "--log-rank", "all", "--hang-timeout", "1", script(TRAIN), "c", monitor=True)
    job.wait_for(r"rank 1 \(cpu:1, process \d+\) hangs: no progress for .* s in compute \(forward\)")
    job.wait_for(r"stacks of rank 1")
    handle = os.open(fifo, os.O_RDWR)  # what it reads comes after all
    os.write(handle, b"x")
    job.wait_for("rank 1 goes on: it was slow, and did not hang")
    os.write(handle, b"x")
    code, text = job.finish()
    os.close(handle)
    assert code == 0 and text.count("made 10 steps") == 2, text
    stacks = (tmp_path / "runs/a/logs/hang-rank-1.txt").read_text()
    assert "in hang_in_c" in stacks and re.search(r"#\d+ +\w*read\+0x", stacks), stacks
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        told = history.execute("SELECT rank, value, words FROM events WHERE event = 'hang' ORDER BY rowid").fetchall()
    assert [one[:2] for one in told] == [(1, 1), (1, 0)] and "no progress for" in told[0][2], told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hang-timeout", "soon"), "--hang-timeout soon is no time"),
        (("--hang-timeout", "0"), "--hang-timeout 0 is no time"),
        (("--on-hang", "panic"), "--on-hang panic is no reaction to a hang"),
    ],
)
def test_wrong_words_are_refused(run, script: Callable[[str], str], words: tuple[str, str], said: str) -> None:
    result = run(*words, script("pass"))
    assert result.returncode == 2 and said in result.stderr


def test_the_environment_is_the_default(run, script: Callable[[str], str]) -> None:
    name = script("print('ran')")
    assert "EVENSTEP_HANG_TIMEOUT never is no time" in run(name, env={"EVENSTEP_HANG_TIMEOUT": "never"}).stderr
    assert "EVENSTEP_ON_HANG panic is no" in run(name, env={"EVENSTEP_ON_HANG": "panic"}).stderr
    assert run("-n", "1", "--hang-timeout", "off", name, env={"EVENSTEP_HANG_TIMEOUT": "never"}).returncode == 0


def test_a_compilation_is_told_apart(monkeypatch) -> None:
    import torch

    from evenstep import _core, ranges
    from evenstep.ranges import Phases

    monkeypatch.setattr(ranges, "_watching", False)  # another test's training may have been the first of this process

    class Told:
        def __init__(self) -> None:
            self.activities: list[int] = []

        def enter(self, activity: int) -> None:
            self.activities.append(activity)

    told = Told()
    phases = Phases(told)  # type: ignore[arg-type]
    model = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    phases.enter("forward")
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # compiled by now
    phases.enter("backward")
    assert told.activities == [_core.AT_FORWARD, _core.AT_COMPILE, _core.AT_FORWARD, _core.AT_BACKWARD]
