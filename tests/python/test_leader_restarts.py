"""The agent of a job of several hosts is killed: the ranks train on; where the job has not all of its hosts, the next one
begins with those that are left."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Sequence

import pytest
from run_jobs import Job, children, supervised, wait_until
from test_checkpoint_copies import _disk as disk_of_its_own
from test_elastic import drain_of
from test_restart_agent import TRAINING as KILLED
from test_restart_agent import expect_same_end, expect_same_processes
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture
from test_run_launched import Launched, agent_of
from test_run_launched import launched as launched  # a fixture

Script = Callable[..., str]

# Trains until it is told, and says with how many it does.
TRAINING = """
    import os, pathlib, time
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80000, 3)), batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for number, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number == 5:
            print("trains with", os.environ["WORLD_SIZE"], "process", os.getpid(), flush=True)
        if pathlib.Path("told").exists():
            break
        time.sleep(0.02)
"""

# Ranks do not outlast their agent so.
ALONE = {"EVENSTEP_RESTART_AGENT": "anew"}
WORDS = ("--name", "a", "--log-rank", "all")
SAVES = ("--checkpoint-every", "4", "--checkpoint-dir", "saved")


def start(
    hosts: Hosts, script: Script, *words: str, before: str = "", saves: Sequence[str] = SAVES, **variables: str
) -> Job:
    hosts.environment = hosts.environment | {"EVENSTEP_HOSTS_PATIENCE": "20"} | variables
    job = hosts.start(*WORDS, *saves, *words, script(TRAINING), before=before)
    job.wait_for("trains with 2", times=2)
    return job


def kill_leader(job: Job) -> None:
    os.kill(supervised(job), signal.SIGKILL)


@pytest.mark.more
def test_ranks_of_two_hosts_outlast_a_killed_leader(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    name = script(KILLED)
    code, text = hosts.run(name, "whole", "0")
    assert code == 0, text
    copies = ("--name", "a", "--checkpoint-every", "3", "--checkpoint-copies", "1")
    job = hosts.start("--json", *copies, name, "a", "2", monitor=True, before=f"{disk_of_its_own(tmp_path)} b")
    for step in (8, 9):
        os.kill(int(job.wait_for(rf"in step {step} agent (\d+)")[0]), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert text.count("the agent before was killed: ranks 0 and 1 train on\n") == 2
    expect_same_end(tmp_path, "a")
    expect_same_processes(tmp_path, "a", 2)
    assert not hosts.agents()
    (copy,) = (tmp_path / "there-b/a/checkpoints").iterdir()
    assert copy.name > "step-00000003" and "has no copy" not in text, text
    verify = [str(hosts.program), "ckpt", "verify", str(copy)]
    assert subprocess.run(verify, timeout=150).returncode == 0


@pytest.mark.parametrize(
    ("recovery", "spares"),
    [
        ("replace", 1),
        pytest.param("shrink", 0, marks=pytest.mark.more),
        pytest.param("replace", 0, marks=pytest.mark.more),
    ],
)
def test_ranks_that_can_go_on_without_one_outlast_killed_agents(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, recovery: str, spares: int
) -> None:
    """The leader's, the other host's; the next ones go on without a rank of that, or with another process, maybe a spare
    that waits there. Copies of checkpoints in that host's memory come all the while, and none stays when it is old."""
    there = hosts.names[1]
    (memory := tmp_path / "memory").mkdir()
    waits = ("--spares", f"{there}:{spares}") if spares else ()
    saves, place = ("--checkpoint-memory", "10"), f"env EVENSTEP_MEMORY_DIR={memory}"
    job = start(hosts, script, "--recovery", recovery, *waits, saves=saves, before=place)
    job.wait_for(f"host {there} has a copy of step-.* in its memory")

    def newest_alone(after: str = "") -> str:
        """Of the copies in one folder, that of the host's first agent."""

        def names() -> list[str]:
            (folder,) = memory.iterdir()
            return [path.parent.name for path in folder.glob("step-????????/manifest.json")]

        found: list[str] = []

        def is_alone() -> bool:  # a look may fall between the next one's coming and its going, and see none
            found[:] = names()
            return len(found) == 1 and found[0] > after

        wait_until(is_alone)
        return found[0]

    rank = int(job.wait_for(r"rank 1[^]]*\] trains with 2 process (\d+)")[0])
    before = newest_alone()
    kill_leader(job)
    job.wait_for("the agent before was killed: ranks 0 and 1 train on")
    before = newest_alone(before)
    (first,) = hosts.agents()
    (agent,) = children(first)
    os.kill(agent, signal.SIGKILL)
    job.wait_for("its agent was killed, and another one goes on with its 1 rank, which trains on")
    newest_alone(before)
    os.kill(rank, signal.SIGKILL)
    job.wait_for("generation 1: rank 0 goes on without rank 1")
    if recovery == "replace":
        job.wait_for(f"generation 2: rank {1 + spares} joins rank 0")
        job.wait_for("trains with 2", times=3)
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0 and "restart" not in text and "Traceback" not in text, text
    assert text.count("trains with 2") == (3 if recovery == "replace" else 2), text
    assert "copies of checkpoints were sent" in text and "has no copy" not in text, text
    # once, and once more where the leader was killed between saying so and noting that; not by each next agent
    assert text.count(f"host {there} has a copy of step-") in (1, 2), text
    wait_until(lambda: not hosts.agents() and not list(memory.iterdir()))


@pytest.mark.more
def test_notice_to_a_host_whose_leaders_agent_was_just_killed(hosts: Hosts, script: Script) -> None:
    """Nobody leads when it comes, or it is not known there yet: the next agent is told."""
    job = start(hosts, script, "--notice", "60")
    (agent,) = hosts.agents()
    kill_leader(job)
    os.kill(agent, signal.SIGTERM)
    code, text = job.finish()
    assert code == 75, text
    assert "the agent before was killed: ranks 0 and 1 train on" in text, text
    assert f"host {hosts.names[1]}: SIGTERM: the training saves its state" in text, text
    assert "the training is saved" in text, text


def cut_off(hosts: Hosts) -> int:
    """From now on nobody reaches the other host; its agent, which is there still."""
    (agent,) = hosts.agents()
    (hosts.folder / "shell.sh").write_text("#!/bin/sh\necho No route to host >&2\nexit 255\n")
    return agent


def test_a_host_that_was_left_out_is_looked_for(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    there = hosts.names[1]
    job = start(hosts, script)
    os.kill(cut_off(hosts), signal.SIGKILL)
    job.wait_for(f"host {there} is left out")
    job.wait_for("trains with 1")
    hosts.shell()
    kill_leader(job)
    job.wait_for("the agent before was killed: restart [12] of 3")
    job.wait_for(f"host {there} stays left out, and its agent is started again meanwhile")
    job.wait_for(f"host {there} is back: the training saves its state")
    job.wait_for("trains with 2", times=4)
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert f"1 rank on 1 host: {hosts.names[0]} 1" in text


@pytest.mark.more
@pytest.mark.parametrize("words", [[], ["--min-ranks", "1"]])
def test_a_host_that_does_not_come_to_the_next_agent(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, words: list[str]
) -> None:
    there = hosts.names[1]
    job = start(hosts, script, *words, **ALONE)
    cut_off(hosts)
    kill_leader(job)
    job.wait_for(f"host {there} is left out: .*No route to host")
    job.wait_for("trains with 1")
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "the agent before was killed: restart 1 of 3" in text
    assert ("the job goes on with 1 rank and the same global batch" in text) == (words == [])


@pytest.mark.more
def test_a_drained_host_stays_away(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    job = start(hosts, script, **ALONE)
    drain = drain_of(hosts, hosts.names[1], "--no-move")
    job.wait_for("trains with 1")
    assert drain.finish()[0] == 0
    kill_leader(job)
    job.wait_for("the agent before was killed: restart 1 of 3")
    job.wait_for("trains with 1", times=2)
    assert not hosts.agents()
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "2 ranks on 2 hosts" not in text.split("the agent before was killed")[1]


@pytest.mark.more
@pytest.mark.parametrize("words", [["--cold"], []])
def test_ranks_that_waited_for_a_drain_end_with_their_agent(
    launched: Launched, script: Script, words: list[str]
) -> None:
    """They end with the agent that has started them; those that were started afterwards do not."""
    name = script(TRAINING)
    jobs = [
        launched.place(
            place,
            "--name",
            "a",
            "--log-rank",
            "all",
            "--min-ranks",
            "1",
            "--checkpoint-every",
            "4",
            "--checkpoint-dir",
            "saved",
            name,
            count=3,
        )
        for place in range(3)
    ]
    leader = jobs[0]
    leader.wait_for("trains with 3", times=3)
    drain = launched.start(
        [
            str(launched.program),
            "drain",
            "--run",
            "a",
            "--no-move",
            *words,
            leader.wait_for(r"3 ranks on 3 hosts: \S+ 1, (\S+) 1")[0],
        ]
    )
    leader.wait_for("trains with 2", times=2)
    assert drain.finish()[0] == 0
    os.kill(agent_of(leader), signal.SIGKILL)
    leader.wait_for("ranks 0 and 1 train on" if words else "restart 1 of 3")
    if not words:
        leader.wait_for("trains with 2", times=4)
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert text.count("trains with 2") == (2 if words else 4), text
