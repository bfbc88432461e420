"""A rank that is truly slowed down in mid-run: the cause that is told, and `--on-straggler`: what becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from run_jobs import Job, Run

# Rank 1 gets busy neighbours on its CPU, in its process group; the training ends some steps after it is gone.
SLOWED = """
import os, signal, time, torch
import evenstep as es
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
data = TensorDataset(torch.randn(4096, 256))
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=128))
spare = int(os.environ["RANK"]) > 1
slowed = left = 0
limit = time.monotonic() + 240
for epoch in es.epochs(1000000):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if es.step() == 60 and os.environ["RANK"] == "1":
            for _ in range(4):
                if os.fork() == 0:
                    while True:
                        pass
        left += 1 if es.world_size() == 1 or spare else 0
        # all end alike: by what all know, the step at which the others went on
        if es.reduce_mean(float(left >= 30 or time.monotonic() > limit)) > 0:
            break
    else:
        continue
    break
print("rank", os.environ["RANK"], "of", es.world_size(), "ends after", left)
"""


@pytest.mark.more
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="busy neighbours need a CPU that the other rank has not")
@pytest.mark.parametrize(
    ("options", "goes_on", "words"),
    [
        (("--recovery", "shrink", "--on-straggler", "leave"), "rank 0 of 1 ends after 3", "without it"),
        (
            ("--recovery", "replace", "--spares", "1", "--on-straggler", "replace"),
            "rank 2 of 2 ends after 3",
            "with the process that waits for a place",
        ),
    ],
)
def test_a_rank_that_is_slowed_for_long_is_ended(
    program: Path,
    environment: dict[str, str],
    script: Callable[[str], str],
    tmp_path: Path,
    options: tuple[str, ...],
    goes_on: str,
    words: str,
) -> None:
    common = ("-n", "2", "--name", "slowed", "--policy", "equal", "--log-rank", "all", "--straggler-patience", "2")
    result = subprocess.run(
        [str(program), "run", *common, *options, script(SLOWED)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert goes_on in text, text
    assert re.search(
        r"rank 1 \(cpu:\d on \S+, process \d+\) held the others up, and was ended for it: .* " + words, text
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/slowed/run.db")) as history:
        told = history.execute("SELECT rank, words FROM events WHERE event='straggler_ended'").fetchall()
    assert [rank for rank, _ in told] == [1] and words in told[0][1], told


# Rank 1 has a slow data set from step 60 on, or busy neighbours on its one CPU. It trains until the file "told" is there.
DISTURBED = """
import os, sys, time, torch
import evenstep as es
from torch.utils.data import DataLoader, Dataset

how, mine = sys.argv[1], os.environ["RANK"] == "1"
torch.set_num_threads(1)

class Data(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        if slow and how == "data":
            time.sleep(0.003)
        return torch.full((256,), i / 4096)

slow = False
neighbours = []
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(Data(), batch_size=32))
limit = time.monotonic() + 240
for epoch in es.epochs(1000000):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if mine and not slow and es.step() >= 60:
            slow = True
            if how == "cpu":
                cpu = {max(os.sched_getaffinity(0))}
                for thread in os.listdir("/proc/self/task"):
                    os.sched_setaffinity(int(thread), cpu)
            for _ in range(8 if how == "cpu" else 0):
                neighbours.append(os.fork())
                if neighbours[-1] == 0:
                    until = limit + 60
                    while os.getppid() != 1 and time.monotonic() < until:
                        pass
                    os._exit(0)
        if es.reduce_mean(float(os.path.exists("told") or time.monotonic() > limit)) > 0:
            break
    else:
        continue
    break
for pid in neighbours:
    os.kill(pid, 9)
"""


@pytest.mark.parametrize(
    ("how", "cause", "words"),
    [
        ("data", "data", r"slow data loading, whose data loading takes \S+ ms of each step"),
        pytest.param(
            "cpu",
            "cpu_taken",
            r"CPU taken by others, which had no CPU \d+% of the time that it could have run",
            marks=[
                pytest.mark.more,  # where other work has the CPUs, too, either rank may be the slow one
                pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the other rank needs a CPU of its own"),
            ],
        ),
    ],
    ids=["data", "cpu"],
)
def test_the_cause_of_a_slow_rank_is_told(
    start: Callable[..., Job], script: Callable[[str], str], tmp_path: Path, how: str, cause: str, words: str
) -> None:
    job = start("-n", "2", "--name", "a", "--policy", "equal", script(DISTURBED), how, monitor=True)
    told = job.wait_for(rf"rank 1 \(cpu:\d on \S+\) is (\S+)x slower since step \d+: {words}", timeout=240)
    assert float(told[0]) >= 1.5
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert re.search(r"rank 1 \(.*\) was \S+x slower from step \d+ to \d+ ", text), text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        kept = history.execute("SELECT cause, begin_step FROM stragglers WHERE rank=1").fetchall()
        events = history.execute("SELECT words FROM events WHERE event='straggler' AND rank=1 AND value>0").fetchall()
    assert any(re.search(words, one) for (one,) in events), events
    first = re.search(rf"rank 1 \(.*\) is \S+x slower since step (\d+): {words}", text)
    assert first, text
    # before that step nobody of ours takes the CPU; others of the machine may
    assert how == "cpu" or int(first[1]) >= 30, text
    # in the end it is what was seen most often: nothing where others of the machine slow rank 0 as much
    causes = {one for one, step in kept if step == int(first[1])}
    assert causes and causes <= {cause, "unknown"}, kept
    page = (tmp_path / "runs/a/report.html").read_text()
    data = re.search(r"const EVENSTEP_DATA = (.*);</script>", page)
    assert data is not None
    shown = [one["cause"] for one in json.loads(data[1])["summary"]["stragglers"] if one["rank"] == 1]
    assert shown == [one for one, _ in kept]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on-straggler", "leave"), "without --recovery shrink they cannot"),
        (("--on-straggler", "replace"), "none can without --recovery replace"),
        (("--on-straggler", "leave", "--recovery", "replace"), "another process would take its place"),
        (("--on-straggler", "stop"), "choose keep, replace or leave"),
        (("--straggler-gain", "10"), "--straggler-gain is of --on-straggler replace and leave"),
        (("--on-straggler", "leave", "--recovery", "shrink", "--straggler-gain", "0"), "from 0.1 to 99"),
        (("--on-straggler", "leave", "--recovery", "shrink", "--straggler-patience", "soon"), "soon is no time"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    run: Run, script: Callable[[str], str], words: tuple[str, ...], said: str
) -> None:
    result = run("-n", "2", *words, script("raise SystemExit('started')"))
    assert result.returncode == 2 and said in result.stderr, result.stderr
