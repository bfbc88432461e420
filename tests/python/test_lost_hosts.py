"""What a job does without a host that is lost and cannot be reached: nothing was said of it (no --min-ranks)."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest
from run_jobs import Job, wait_until
from test_drain import TRAINING
from test_elastic import WAITING, ends_the_same, lose
from test_run_hosts import Hosts, await_link
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

Script = Callable[..., str]

OWN_BATCHES = """
import os, time
import torch
import evenstep as es

rank, ranks, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = es.prepare(model, optimizer)
for step in range(6 if attempt == "1" else 10000):
    optimizer.zero_grad()
    model(torch.ones(8, 3)).sum().backward()
    optimizer.step()
    if step == 5:
        print(f"rank {rank} of {ranks} attempt {attempt}", flush=True)
    time.sleep(0.02)
"""

WORDS = ("--name", "a", "--max-restarts", "1", "--log-rank", "all")


def cable(hosts: Hosts, state: str) -> None:
    subprocess.run(["ip", "-n", hosts.names[1], "link", "set", "eth0", state], check=True)


def without(hosts: Hosts, *words: str, **variables: str) -> Job:
    """The other host's agent is killed, and none can be started there."""
    hosts.environment = hosts.environment | variables
    job = hosts.start(*WORDS, *words)
    lose(hosts, job)
    return job


def test_of_two_hosts_cut_apart_the_first_goes_on_and_the_other_comes_back(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    there = hosts.names[1]
    hosts.environment = hosts.environment | {"EVENSTEP_HOSTS_PATIENCE": "6"}
    words = (*WORDS, "--checkpoint-every", "4", "--checkpoint-dir", "saved", script(TRAINING))
    job = hosts.start(*words, before="setsid")  # no signal of the first host's reaches what runs there
    job.wait_for("at step 8 as process", times=2)
    cable(hosts, "down")
    try:
        job.wait_for(f"host {there} is lost: ")
        job.wait_for(f"host {there} is left out: .*its agent (did not come|ended before it came) here")
        job.wait_for("the job goes on with 1 rank and the same global batch, and starts that host's agent again")
        job.wait_for("at step 8 as process", times=3)
        wait_until((log := tmp_path / "runs/a/logs/leader.log").exists)
        wait_until(lambda: not hosts.agents())
        said = log.read_text()
        assert "the leader is lost, or this host is cut off from it (" in said
        assert "the ranks here have ended, and their agent ends; a leader that lives goes on, and starts this" in said
    finally:
        cable(hosts, "up")
    await_link(there)
    job.wait_for(f"host {there} is back: the training saves its state after the step under way, and goes on with 2")
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "restart 1 of 1 from " in text and "the hosts change: the job goes on from " in text
    ends_the_same(text, 2)


def test_ranks_with_batches_of_their_own_wait_for_the_host(hosts: Hosts, script: Script) -> None:
    job = without(hosts, script(OWN_BATCHES))
    job.wait_for(
        "1 rank is left, and a script not seen to train with a loader of es.prepare needs 2: the job waits, "
        rf"up to 600 s \(EVENSTEP_MIN_RANKS_PATIENCE\), until {hosts.names[1]}"
    )
    hosts.shell()
    code, text = job.finish()
    assert code == 0, text
    assert f"host {hosts.names[1]} is back" in text and "restart 1 of 1" in text


@pytest.mark.parametrize("does", ["end", "elsewhere"])
def test_where_it_is_said_so_the_job_ends(hosts: Hosts, script: Script, tmp_path: pathlib.Path, does: str) -> None:
    name = script(WAITING, "wait.sh")
    (tmp_path / name).chmod(0o755)
    if does != "end":
        hosts.environment = hosts.environment | {"EVENSTEP_LOST_HOST": does}
        code, text = hosts.run("--no-python", f"./{name}")
        assert code == 2 and "EVENSTEP_LOST_HOST=elsewhere is nothing that" in text, text
        return
    job = without(hosts, "--no-python", f"./{name}", FREE="1", EVENSTEP_LOST_HOST=does)
    code, text = job.finish()
    assert code == 7 and "No route to host" in text, text
