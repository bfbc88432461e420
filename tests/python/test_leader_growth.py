"""Hosts that join while the others train, where another host takes a lost leader's place (network namespaces of this machine;
root, ip and UCX): whoever has joined outlasts the leader, and under the next one others join, by way of any host."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable

import generation_cases as cases
import pytest
import three_hosts
from run_jobs import Job, wait_until
from test_replacement import assert_replaced
from three_hosts import STANDS, Hosts, leads

from evenstep import hosts as of_hosts

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures
Script = Callable[[str], str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")

# Rank 0 ends its agent, which leads; nobody goes past step 5 before the test says that all can vote.
GROWING = cases.REPLACED.replace(
    "os.kill(os.getpid(), 9)", "os.kill(os.getppid() if rank == '0' else os.getpid(), 9); time.sleep(600)"
).replace(
    "        if not joined:\n",
    """        while es.step() == 5 and not os.path.exists("go"):
            time.sleep(0.02)
        if not joined:
""",
)
FULL = "4"
KEY = "ab" * 32


def started(hosts: Hosts, *words: str) -> tuple[Job, str]:
    """A job of three hosts that others may join, and at which port."""
    hosts.environment = hosts.environment | {"EVENSTEP_JOB_KEY": KEY, "FULL": FULL, "UCX_TLS": "tcp,self"}
    job = hosts.start("--name", "a", "--max-ranks", FULL, "--log-rank", "all", *words)
    (port,) = job.wait_for(r"hosts join at \S+:(\d+) ")
    job.wait_for(STANDS)
    return job, port


def join(hosts: Hosts, number: int, identity: str, where: str) -> Job:
    """In the network of a host of the job; by that identity, or another one's."""
    command = ["ip", "netns", "exec", hosts.names[number], "env", f"EVENSTEP_HOST_ID={identity}"]
    hosts.jobs.append(Job([*command, str(hosts.program), "join", "-n", "1", where], hosts.folder, hosts.environment))
    return hosts.jobs[-1]


def said(folder: pathlib.Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "runs/a/logs").glob("rank-*.log")))


@pytest.mark.more
def test_who_has_joined_outlasts_the_leader_and_others_join_under_the_next(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    assert "os.getppid() if rank" in GROWING and 'exists("go")' in GROWING
    job, port = started(hosts, "--recovery", "shrink", "--max-restarts", "0", script(GROWING), "0@forward:6", "3,9")
    fourth = join(hosts, 2, f"{hosts.names[2]}-d", f"10.80.1.2:{port}")  # which does not lead
    fourth.wait_for("this host takes part: rank 3, while the others train")
    job.wait_for(r"takes its place \(3 of 4 vote\)")
    (tmp_path / "go").touch()
    wait_until(lambda: re.search(r"hosts join at \S+:(\d+) ", hosts.log("a")))
    other = next(number for number in (1, 2) if not leads(hosts, hosts.names[number]))
    lost = hosts.names[0]
    again = join(hosts, 0, lost, f"10.80.0.2,10.80.{other}.2:{port}")  # where it is itself, nobody answers
    wait_until(lambda: "a ended well" in hosts.log("a"))
    log = hosts.log("a")
    assert "this host leads now (generation 2): ranks that live keep their processes" in log, log
    assert re.search(r"ranks 1, 2 and 3 go on without host", log), log
    assert "joins with 1 rank: processes start there while the others train" in log, log
    notices = "".join(f"{line}\n" for line in log.splitlines() if line.startswith("evenstep:"))
    assert_replaced(said(tmp_path) + notices, [1, 2])
    for each in (fourth, again):
        code, text = each.finish()
        assert code == 0, text
    job.finish()
    wait_until(lambda: not hosts.agents())
