"""`evenstep run --restart-agent`: evenstep itself is killed, and the job goes on."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sqlite3

import pytest
from run_jobs import Run, alive, wait_until, write_checkpoint

# Rank 0 says who its agent is in step 8 of each of the first `stops` attempts, and waits there.
TRAINING = """
import os, sys, time
import torch
import evenstep as es

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)

tag, stops = sys.argv[1], int(sys.argv[2])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=12, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader)
for epoch in es.epochs(2):
    for x in loader:
        if es.step() == 8 and attempt < stops:
            while not os.path.isdir(os.environ["EVENSTEP_CHECKPOINT_DIR"] + "/step-00000006"):  # written meanwhile
                time.sleep(0.01)
            print("in attempt", attempt, "agent", os.getppid(), flush=True)
            time.sleep(600)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
if es.is_main():
    torch.save([es.step(), [p.detach() for p in model.parameters()]], f"end-{tag}.pt")
"""


def expect_same_end(folder: pathlib.Path, tag: str) -> None:
    import torch

    (steps, parameters), (all_steps, wanted) = (torch.load(folder / f"end-{name}.pt") for name in (tag, "whole"))
    assert steps == all_steps == 16
    for have, want in zip(parameters, wanted):
        assert float((have - want).norm() / want.norm()) <= 1e-12


def test_a_killed_agent_is_started_again(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    name = script(TRAINING)
    assert run("-n", "2", "--no-monitor", name, "whole", "0").returncode == 0
    job = start("-n", "2", "--checkpoint-every", "3", "--restart-agent", "--json", name, "a", "1", monitor=True)
    agent = int(job.wait_for(r"in attempt 0 agent (\d+)")[0])
    assert agent != job.process.pid
    os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert f"(process {agent}) was ended by SIGKILL: another one is started" in text
    assert re.search(r"the agent before was killed: restart 1 of 3 from \S+/step-0*6\n", text)
    outcome = json.loads(re.findall(r"^\{.*$", text, re.MULTILINE)[-1])
    assert outcome["restarts"] == 1 and outcome["exit_code"] == 0
    expect_same_end(tmp_path, "a")
    with sqlite3.connect(f"{tmp_path}/{outcome['run_folder']}/run.db") as history:
        assert history.execute("SELECT value, words FROM events WHERE event = 'attempt'").fetchall() == [
            (1, "restart 1")
        ]
        assert history.execute("SELECT MIN(step) FROM steps").fetchone() == (6,)
    assert len(list((tmp_path / "runs").iterdir())) == 2  # in the folder that it had, which nobody has named


@pytest.mark.parametrize("resume", [[], ["--resume", "chosen"]])
def test_it_goes_on_from_what_the_job_has(run: Run, script, tmp_path: pathlib.Path, resume: list[str]) -> None:
    write_checkpoint(tmp_path / "chosen")
    write_checkpoint(tmp_path / "kept/step-00000007")  # another training's
    write_checkpoint(tmp_path / "made")
    name = script("""
        import os, signal, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        with open("said", "a") as said:  # of what is printed the agent may have read nothing when it is killed
            print(os.environ.get("EVENSTEP_RESUME"), file=said)
        if attempt == 1:
            os.rename("made", "kept/step-00000003")
        if attempt < 2:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
    """)
    ended = run("-n", "1", "--checkpoint-dir", "kept", "--restart-agent", "--name", "a", *resume, name)
    assert ended.returncode == 0, ended.stderr
    begun = str(tmp_path / "chosen") if resume else "None"
    assert (tmp_path / "said").read_text().split() == [begun, begun, str(tmp_path / "kept/step-00000003")]
    assert (tmp_path / "runs/a/logs/rank-0.log").read_text().count("==== attempt") == 3
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a"]


def test_restarts_of_agents_are_counted(run: Run, script) -> None:
    name = script("""
        import os, signal, time
        own = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"  # a rank alone, in between
        os.kill(os.getpid() if own else os.getppid(), signal.SIGKILL)
        time.sleep(600)
    """)
    ended = run("-n", "1", "--max-restarts", "2", "--restart-agent", name)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "restart 1 of 2" in ended.stderr and "restart 2 of 2" in ended.stderr
    assert "was ended by SIGKILL, and no restart is left (--max-restarts 2)" in ended.stderr


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, ""), (signal.SIGHUP, "")]
)
def test_a_signal_to_all_is_told_once(start, script, number: signal.Signals, words: str) -> None:
    name = script(f"""
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
        signal.signal({int(number)}, lambda *_: print("told", flush=True))
        print("up", flush=True)
        while True:
            time.sleep(1)
    """)
    job = start("-n", "1", "--restart-agent", name)
    job.wait_for("up")
    os.killpg(job.process.pid, number)  # as a terminal does, and schedulers
    job.wait_for("told")
    job.process.send_signal(signal.SIGUSR1)  # behind what was passed on
    code, text = job.finish()
    assert code == 128 + number and words in text
    assert "again: killing" not in text and text.count("told") == 1, text


def test_where_it_cannot_be(run: Run, script) -> None:
    name = script("")
    ended = run("--restart-agent", "--hosts", "auto", name)
    assert ended.returncode == 2 and "--restart-agent is not of --hosts auto" in ended.stderr
    for words in (("--hosts", "here:1,there:1", "--witness", "third"), ("--hosts", "a:1,b:1,c:1", "--replace-leader")):
        ended = run("--restart-agent", *words, name)
        assert ended.returncode == 2 and "another host takes its place" in ended.stderr, ended.stderr
    variable = {"EVENSTEP_RESTART_AGENT": "1"}
    assert "EVENSTEP_RESTART_AGENT is not of --hosts auto" in run("--hosts", "auto", name, env=variable).stderr


@pytest.mark.more
def test_twice(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    name = script(TRAINING)
    assert run("-n", "2", "--no-monitor", name, "whole", "0").returncode == 0
    job = start("-n", "2", "--checkpoint-every", "3", "--restart-agent", "--name", "a", name, "a", "2")
    for attempt in range(2):
        os.kill(int(job.wait_for(rf"in attempt {attempt} agent (\d+)")[0]), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and "restart 2 of 3" in text, text
    expect_same_end(tmp_path, "a")


@pytest.mark.more
def test_while_it_starts(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    name = script(TRAINING)
    assert run("-n", "2", "--no-monitor", name, "whole", "0").returncode == 0
    job = start("-n", "2", "--checkpoint-every", "3", "--restart-agent", "--name", "a", name, "a", "1")
    first = int(job.wait_for(r"in attempt 0 agent (\d+)")[0])
    os.kill(first, signal.SIGKILL)
    children = pathlib.Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
    own = pathlib.Path(f"/proc/{job.process.pid}/cmdline").read_bytes()

    def agents() -> list[int]:
        found = [int(word) for word in children.read_text().split() if int(word) != first]
        return [pid for pid in found if pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() == own]

    job.wait_for("another one is started")
    wait_until(lambda: not alive(first))
    before = set(agents())  # the guardian, for a while
    wait_until(lambda: set(agents()) - before)
    for pid in set(agents()) - before:
        os.kill(pid, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and text.count("another one is started") == 2, text
    expect_same_end(tmp_path, "a")


@pytest.mark.more
def test_nothing_is_left_of_a_killed_supervisor(start, script) -> None:
    name = script("""
        import os, time
        print("rank", os.getpid(), "agent", os.getppid(), flush=True)
        time.sleep(600)
    """)
    job = start("-n", "2", "--log-rank", "all", "--restart-agent", name)
    found = job.wait_for(r"(rank \d+ agent \d+)\n", times=2)
    job.process.kill()
    wait_until(lambda: not any(alive(int(pid)) for line in found for pid in re.findall(r"\d+", line)))
    assert job.finish()[0] == -signal.SIGKILL


@pytest.mark.more
def test_ctrl_c_while_it_is_to_start(start, script) -> None:
    name = script("""
        import os, signal, time
        print("up", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    """)
    job = start("-n", "1", "--restart-agent", name)
    job.wait_for("another one is started")
    os.killpg(job.process.pid, signal.SIGINT)
    code, text = job.finish()
    assert code == 130, text


@pytest.mark.more
def test_a_signal_to_the_agent_alone_ends_the_job(start, script) -> None:
    name = script("""
        import os, time
        print("agent", os.getppid(), flush=True)
        time.sleep(600)
    """)
    job = start("-n", "1", "--restart-agent", name)
    os.kill(int(job.wait_for(r"agent (\d+)")[0]), signal.SIGTERM)
    code, text = job.finish()
    assert code == 128 + signal.SIGTERM and "another one" not in text
