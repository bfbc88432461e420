"""A place whose rank is the first to fail attempt after attempt is left out of the next one."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import test_run_hosts as two_hosts
from run_jobs import Run
from script_parts import AGENT

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures

# ranks may share a device: who they are is seen by their quotas
DIES = """
    import os, signal, sys
    world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "world", world, "speeds", os.environ.get("EVENSTEP_SPEEDS", ""), flush=True)
    if world == 3:
        if rank == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGBUS)
        signal.pause()
"""
WORDS = ("-n", "3", "--no-pin", "--log-rank", "all", "--cpu-quota", "0:0.5,2:0.25")


@pytest.mark.parametrize("bad", ["1", pytest.param("0", marks=pytest.mark.more)])
def test_it_is_left_out_with_the_reason(run: Run, script: Any, bad: str) -> None:
    done = run(*WORDS, "--max-restarts", "3", "--set-aside", script(DIES), bad)
    assert done.returncode == 0, done.stderr
    assert f"place {bad} (cpu" in done.stderr
    assert "is set aside for 60 s: its rank was the first to fail in 2 attempts in a row (SIGBUS)" in done.stderr
    assert "the job goes on with 2 ranks" in done.stderr and "restart 2 of 3" in done.stderr
    quotas = ["0.5", "1", "0.25"]
    del quotas[int(bad)]
    assert done.stdout.count(f"attempt 2 world 2 speeds {','.join(quotas)}") == 2
    assert "attempt 1 world 3 speeds 0.5,1,0.25" in done.stdout


def test_rank_0_is_shown_whose_place_is_another_now(run: Run, script: Any) -> None:
    done = run("-n", "2", "--no-pin", "--set-aside", script(DIES.replace("world == 3", "world == 2")), "0")
    assert done.returncode == 0 and "place 0 (cpu" in done.stderr, done.stderr
    assert re.findall(r"attempt (\d) world (\d)", done.stdout) == [("0", "2"), ("1", "2"), ("2", "1")]


def test_another_agent_leaves_it_out_too(start: Any, script: Any, tmp_path: Path) -> None:
    """The ranks that are left train on with it; where they end with an agent, the next attempt does without, too."""
    waits = (
        AGENT
        + """
import signal, sys, time
if os.environ["WORLD_SIZE"] == "2":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGBUS)
    signal.pause()
before = agent()
while before == 0:
    before = agent()
os.kill(before, signal.SIGKILL)
while agent() in (0, before):
    time.sleep(0.01)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2":
    os.kill(os.getpid(), signal.SIGKILL)
print("alone at the end", flush=True)
"""
    )
    words = ("-n", "2", "--no-pin", "--set-aside", "--max-restarts", "5", "--name", "a")
    code, text = start(*words, script(waits), monitor=True).finish()
    assert code == 0, text
    assert text.count("the agent before was killed: rank 0 trains on") == 2, text
    assert len(re.findall(r"place 1 \(\S+\) stays set aside for another \d+ s", text)) == 2, text
    assert "restart 3 of 5" in text and "alone at the end" in text, text


@pytest.mark.more
def test_a_place_takes_part_again_under_another_agent(start: Any, script: Any) -> None:
    """That began without it: the ranks had ended with the one before."""
    waits = (
        AGENT
        + """
import signal, time
world, attempt = os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if world == "2" and attempt in "01":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGBUS)
    signal.pause()
if attempt == "2":
    os.kill(agent(), signal.SIGKILL)
    signal.pause()
if world == "1":
    time.sleep(61)  # so long it is set aside
    os.kill(os.getpid(), signal.SIGKILL)
print("again with", world, flush=True)
"""
    )
    words = ("-n", "2", "--no-pin", "--set-aside", "--max-restarts", "5", "--log-rank", "all", "--name", "a")
    before = ["env", "EVENSTEP_RESTART_AGENT=anew"]
    code, text = start(*words, script(waits), before=before, monitor=True).finish()
    assert code == 0 and "stays set aside for another" in text, text
    assert "takes part again" in text and text.count("again with 2") == 2, text


def test_where_it_does_not_go(run: Run, script: Any) -> None:
    done = run("-n", "2", "--set-aside", "--max-ranks", "4", script(DIES), "1")
    assert done.returncode == 2 and "not with --max-ranks" in done.stderr
    done = run("--hosts", "a,b", "--set-aside", "--recovery", "shrink", script(DIES), "1")
    assert done.returncode == 2 and "give --no-replace-leader" in done.stderr


@pytest.mark.parametrize("way", ["shrink", pytest.param("replace", marks=pytest.mark.more)])
def test_with_recovery_what_ends_attempts_counts(run: Run, script: Any, way: str) -> None:
    """Nobody has come to es.prepare: the others cannot go on without it."""
    done = run(*WORDS, "--max-restarts", "3", "--set-aside", "--recovery", way, script(DIES), "1")
    assert done.returncode == 0, done.stderr
    assert "place 1 (cpu" in done.stderr and "the job goes on with 2 ranks" in done.stderr
    assert done.stdout.count("attempt 2 world 2 speeds 0.5,0.25") == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (2, ()),
        pytest.param(0, (), marks=pytest.mark.more),
        pytest.param(2, ("--recovery", "shrink", "--no-replace-leader"), marks=pytest.mark.more),
    ],
)
def test_a_host_leaves_one_of_its_places_out(
    hosts: two_hosts.Hosts, script: Any, tmp_path: Path, bad: int, words: tuple[str, ...]
) -> None:
    """And another agent does, where the leader's is killed: the ranks that are left train on."""
    devices = (
        AGENT
        + """
import signal, sys, time
world, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
device = os.environ["EVENSTEP_DEVICE"]
print("host", os.environ["EVENSTEP_HOST_ID"], "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "world", world, device, flush=True)
if world == 4:
    if rank == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGBUS)
    signal.pause()
if rank == "0":
    while agent() == 0:
        time.sleep(0.01)
    print("agent", agent(), flush=True)
while not os.path.exists("on"):
    time.sleep(0.01)
"""
    )
    job = ("--max-restarts", "3", "--log-rank", "all", "--set-aside", "--name", "a", *words)
    started = hosts.start(*job, script(devices), str(bad), ranks=":2", monitor=True)
    started.wait_for("attempt 2 world 3", times=3)
    os.kill(int(started.wait_for(r"\] agent ([1-9]\d*)")[0]), signal.SIGKILL)
    started.wait_for("the agent before was killed: ranks 0, 1 and 2 train on")
    (tmp_path / "on").touch()
    code, text = started.finish()
    assert code == 0, text
    assert re.search(rf"place 0 \(\S+\) of host {hosts.names[bad // 2]} stays set aside for another \d+ s", text), text
    host = hosts.names[bad // 2]
    found = re.search(
        rf"place 0 \((\S+)\) of host {host} is set aside for 60 s: its rank was the first to fail in 2", text
    )
    assert found is not None and "the job goes on with 3 ranks" in text, text
    numbers = [1 if name == host else 2 for name in hosts.names]
    assert "3 ranks on 2 hosts: " + ", ".join(f"{n} {c}" for n, c in zip(hosts.names, numbers)) in text, text
    before = re.findall(rf"\[rank {bad}\b.*\] host {host} attempt 0 world 4 (\S+)", text)
    after = re.findall(rf"host {host} attempt 2 world 3 (\S+)", text)
    assert before == [found[1]] and len(after) == 1 and after != before, text
    assert len(re.findall(r"attempt 2 world 3", text)) == 3, text


@pytest.mark.more
def test_without_the_option_all_take_part(run: Run, script: Any) -> None:
    done = run(*WORDS, "--max-restarts", "2", script(DIES), "1")
    assert done.returncode == 128 + 7 and "set aside" not in done.stderr


@pytest.mark.more
def test_an_error_of_the_script_sets_nobody_aside(run: Run, script: Any) -> None:
    """Others make it, too: who is first is chance."""
    raises = DIES.replace("os.kill(os.getpid(), signal.SIGBUS)", "raise ValueError('mine')")
    done = run(*WORDS, "--max-restarts", "3", "--set-aside", script(raises), "1")
    assert done.returncode == 1 and "set aside" not in done.stderr and "restart 3 of 3" in done.stderr


@pytest.mark.more
def test_a_training_goes_on_and_its_history_does(start: Any, script: Any, tmp_path: Path) -> None:
    name = script(
        """
        import os, signal
        import torch
        import evenstep as es

        data = torch.utils.data.TensorDataset(torch.ones(64, 2))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
        began = es.step()
        for batch, in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if es.step() == began + 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
        es.print("ended at", es.step(), "of", es.world_size())
        """
    )
    words = ("-n", "2", "--no-pin", "--name", "a", "--checkpoint-every", "1", "--set-aside", "--json")
    code, text = start(*words, name, monitor=True).finish()
    assert code == 0, text
    assert "ended at 16 of 1" in text and "place 1 (cpu" in text and "is set aside for 60 s" in text
    outcome = json.loads(next(line for line in text.splitlines() if line.startswith('{"exit_code"')))
    assert outcome["restarts"] == 2 and outcome["exit_code"] == 0
    with sqlite3.connect(tmp_path / "runs/a/run.db") as history:
        assert history.execute("select max(step) from steps").fetchone()[0] == 15
    assert (tmp_path / "runs/a/report.html").exists()
