"""`--on-straggler` on several hosts, and under another leader (network namespaces of this machine; root, ip and UCX)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator

import pytest
import test_run_hosts as two_hosts
import three_hosts
from run_jobs import end_all, wait_until

from evenstep import hosts as of_hosts

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
Script = Callable[[str], str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}"),
]

# A rank (the first word) has ten times as much to compute from step 60 on, in its first process; another one (the second) ends its
# agent before that. All end 20 steps after another process has come, or fewer ranks than the third word says are left.
SLOWS = """
import os, sys, time, torch
import evenstep as es
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
slow, ends_agent, few = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank, fresh = os.environ["RANK"], os.path.exists("slowed")
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
data = TensorDataset(torch.randn(4096, 128))
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=128))
work = torch.randn(256, 256)
while not os.path.exists("go"):
    time.sleep(0.02)
left, limit = 0, time.monotonic() + 200
for epoch in es.epochs(1000000):
    for (x,) in loader:
        if rank == ends_agent and es.step() == 20:
            os.kill(os.getppid(), 9)
        if rank == slow and not fresh and es.step() >= 60:
            open("slowed", "w").close()
            for _ in range(60):
                work @ work
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        left += fresh or es.world_size() < few
        if es.reduce_mean(float(left >= 20 or time.monotonic() > limit)) > 0:
            break
    else:
        continue
    break
print("rank", rank, "of", es.world_size(), "ends after", left, flush=True)
"""
EQUAL = ("--name", "a", "--policy", "equal", "--log-rank", "all", "--straggler-patience", "2")


@pytest.mark.parametrize(
    ("way", "few", "ends", "words"),
    [
        ("leave", "4", "rank 0 of 3 ends after 20", "without it"),
        ("replace", "0", "rank 3 of 4 ends after 20", "with one as fast as it was before"),
    ],
)
def test_a_slow_rank_of_another_host_is_ended(
    hosts: two_hosts.Hosts, script: Script, tmp_path: pathlib.Path, way: str, few: str, ends: str, words: str
) -> None:
    (tmp_path / "go").touch()
    recovery = ("--recovery", "shrink" if way == "leave" else way, "--on-straggler", way)
    code, text = hosts.run(*EQUAL, *recovery, script(SLOWS), "3", "none", few, ranks=":2", monitor=True)
    assert code == 0, text
    assert ends in text, text
    there = rf"rank 3 \(cpu:\d on {hosts.names[1]}"
    assert re.search(there + r"\) holds the others up, and is ended: .* ms " + words, text), text
    assert re.search(there + r", process \d+\) held the others up, and was ended for it", text), text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        told = history.execute("SELECT rank, words FROM events WHERE event='straggler_ended'").fetchall()
        seen = history.execute("SELECT rank, host FROM stragglers").fetchall()
    assert [rank for rank, _ in told] == [3] and words in told[0][1], told
    assert (3, hosts.names[1]) in seen, seen
    assert "the link" not in text, text  # it is late to each exchange, and no link is slow


# Until "stop" is there; says when it has trained for long enough for what is usual to be known.
EXCHANGES = """
import os, time, torch
import evenstep as es
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Linear(128, 128)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
data = TensorDataset(torch.randn(4096, 128))
model, optimizer, loader = es.prepare(model, optimizer, DataLoader(data, batch_size=16))
begun, said = time.monotonic(), False
for epoch in es.epochs(1000000):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not said and es.step() > 400 and time.monotonic() - begun > 7:
            said = print("usual", flush=True) is None
        if es.reduce_mean(float(os.path.exists("stop") or time.monotonic() - begun > 400)) > 0:
            break
    else:
        continue
    break
"""


@pytest.mark.skipif(shutil.which("tc") is None, reason="no tc (apt-get install iproute2)")
def test_a_link_that_becomes_slow_is_told(hosts: two_hosts.Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    def shape(words: str) -> None:
        subprocess.run(["tc", "-n", hosts.names[1], "qdisc", *words.split()], check=True, capture_output=True)

    job = hosts.start("--name", "a", "--log-rank", "0", script(EXCHANGES), monitor=True)
    job.wait_for("usual")
    shape("add dev eth0 root tbf rate 3mbit burst 16kb latency 600ms")
    try:
        job.wait_for(
            r"the link between hosts \S+ and \S+ is \S+x slower than usual: a transfer takes \S+ ms instead of",
            timeout=300,
        )
    finally:
        shape("del dev eth0 root")
    job.wait_for(r"the link between hosts \S+ and \S+ was \S+x slower from about step \d+ to \d+", timeout=300)
    (tmp_path / "stop").touch()
    code, text = job.finish()
    assert code == 0, text
    with contextlib.closing(sqlite3.connect(tmp_path / "runs/a/run.db")) as history:
        told = history.execute("SELECT value FROM events WHERE event='link' ORDER BY at_ns").fetchall()
    assert len(told) == 2 and told[0][0] > 300 and told[1][0] == 0, told


of_three = three_hosts.names  # fixture


@pytest.fixture
def three(
    of_three: list[str], program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]
) -> Iterator[three_hosts.Hosts]:
    group = three_hosts.Hosts(of_three, program, tmp_path, environment)
    yield group
    end_all(group.jobs, group.agents)


def test_the_next_leader_ends_a_slow_rank(three: three_hosts.Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    words = ("--recovery", "replace", "--on-straggler", "replace", "-n", "2", script(SLOWS), "5", "0", "0")
    job = three.start(*EQUAL, *words)
    job.wait_for(three_hosts.STANDS)
    three.reach_nobody()
    (tmp_path / "go").touch()
    wait_until(lambda: "a ended well" in three.log("a"))
    log = three.log("a")
    assert "this host leads now (generation 2): ranks that live keep their processes" in log, log
    assert re.search(r"rank 5 \(.*\) holds the others up, and is ended: .* with one as fast as it was before", log), log
    said = (tmp_path / "runs/a/logs/rank-5.log").read_text()
    assert "rank 5 of 4 ends after 20" in said, said
    wait_until(lambda: not three.agents())
    job.finish()
