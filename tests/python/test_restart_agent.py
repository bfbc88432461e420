"""The agent of `evenstep run` is killed, and the job goes on."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
from run_jobs import Run, alive, children, end_soon, free_port, wait_until, write_checkpoint
from script_parts import AGENT

# Rank 0 says who its agent is in step 8, and so on as often as it is to, and waits there for the next one. RANK@STEP: that
# one is killed there, the first time that it comes there; RANK@STEP:NEXT, once NEXT waits for a place, and who is started
# in its place comes to es.prepare once NEXT has joined.
TRAINING = (
    AGENT
    + """
import sys, time
import torch
import evenstep as es
from evenstep import _core

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)

class Board:  # says of who waits for a place that it does
    plain = _core.Generation

    def __init__(self, fd):
        self.whole = self.plain(fd)

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def offer(self, rank):
        self.whole.offer(rank)
        open(f"waits-{rank}", "w").close()

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

_core.Generation = Board
tag, stops = sys.argv[1], int(sys.argv[2])
rank, deaths = os.environ["RANK"], dict(word.partition(":")[::2] for word in sys.argv[3:])
joins = os.environ.get("EVENSTEP_JOINS") == "1"
with open(f"ranks-{tag}", "a") as ranks:
    print(rank, os.getpid(), file=ranks)
for death, after in deaths.items():
    if after and death.startswith(f"{rank}@") and os.path.exists(death):
        wait_for(f"joined-{after}")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
loader = torch.utils.data.DataLoader(Data(), batch_size=12, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader)
for epoch in es.epochs(2):
    for x in loader:
        if es.is_main() and es.step() >= 8 and stops > 0:
            stops -= 1
            before = agent()
            print("in step", es.step(), "agent", before, flush=True)
            while agent() in (0, before):
                time.sleep(0.01)
        if joins:
            open(f"joined-{rank}", "w").close()
        death = f"{rank}@{es.step()}"
        if death in deaths and not os.path.exists(death):
            if deaths[death]:
                wait_for(f"waits-{deaths[death]}")
            open(death, "w").close()
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
if es.is_main():
    torch.save([es.step(), [p.detach() for p in model.parameters()]], f"end-{tag}.pt")
"""
)


def expect_same_end(folder: pathlib.Path, tag: str) -> None:
    import torch

    (steps, parameters), (all_steps, wanted) = (torch.load(folder / f"end-{name}.pt") for name in (tag, "whole"))
    assert steps == all_steps == 16
    for have, want in zip(parameters, wanted):
        assert float((have - want).norm() / want.norm()) <= 1e-12


def expect_same_processes(folder: pathlib.Path, tag: str, ranks: int) -> None:
    assert sorted(line.split()[0] for line in (folder / f"ranks-{tag}").read_text().splitlines()) == [
        str(rank) for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("words", "deaths"),
    [([], []), (["--recovery", "replace", "--spares", "1", "--min-ranks", "2"], ["1@12:2", "2@14:1"])],
)
def test_ranks_outlast_a_killed_agent(
    run: Run, start, script, tmp_path: pathlib.Path, words: list[str], deaths: list[str]
) -> None:
    """So do spares; of those that die later one's place is the spare's, who starts under the last agent has another's."""
    name = script(TRAINING)
    assert run("-n", "2", "--no-monitor", name, "whole", "0").returncode == 0
    job = start("-n", "2", "--json", *words, name, "a", "2", *deaths, monitor=True)
    for step in (8, 9):
        agent = int(job.wait_for(rf"in step {step} agent (\d+)")[0])
        assert agent != job.process.pid
        os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert f"(process {agent}) was ended by SIGKILL: another one is started in 2 s, and its ranks train on" in text
    assert text.count("the agent before was killed: ranks 0 and 1 train on\n") == 2
    outcome = json.loads(re.findall(r"^\{.*$", text, re.MULTILINE)[-1])
    assert outcome["restarts"] == 0 and outcome["exit_code"] == 0
    expect_same_end(tmp_path, "a")
    if deaths:
        assert "generation 2: rank 2 joins rank 0\n" in text and "generation 4: rank 1 joins rank 0\n" in text, text
        began = [line.split()[0] for line in (tmp_path / "ranks-a").read_text().splitlines()]
        assert sorted(began[:4]) == ["0", "1", "1", "2"] and "0" not in began[3:]
    else:
        expect_same_processes(tmp_path, "a", 2)
    assert len(list((tmp_path / "runs").iterdir())) == 2  # in the folder that it had, which nobody has named


def test_a_rank_that_ends_alone_is_gone_without(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    """A rank is killed while no agent lives: the next one has the others go on, and again when another is killed."""
    name = script(TRAINING)
    job = start("-n", "3", "--recovery", "shrink", "--log-rank", "all", name, "a", "1", "1@12", monitor=True)
    agent = int(job.wait_for(r"in step 8 agent (\d+)")[0])
    ranks = dict(map(str.split, (tmp_path / "ranks-a").read_text().splitlines()))
    os.kill(agent, signal.SIGSTOP)  # it hears of nothing
    os.kill(int(ranks["2"]), signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert "generation 1: ranks 0 and 1 go on without rank 2" in text
    assert "generation 2: rank 0 goes on without rank 1" in text and "restart" not in text
    expect_same_processes(tmp_path, "a", 3)


def test_what_goes_with_an_agent_stays_for_the_next(start, script, tmp_path: pathlib.Path) -> None:
    """Checkpoints in memory, quotas, the guardian: what is done with them later is done by the second agent."""
    end = "if es.is_main():\n    torch.save"
    assert end in TRAINING
    name = script(
        TRAINING.replace(
            end,
            """
    if os.environ["RANK"] == "1" and epoch == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not os.listdir(os.environ["EVENSTEP_CHECKPOINT_MEMORY"]):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
"""
            + end,
        )
    )
    words = ("--checkpoint-memory", "2", "--cpu-quota", "1:0.5", "--checkpoint-every", "1000")
    job = start("-n", "2", *words, name, "a", "1", monitor=True)
    os.kill(int(job.wait_for(r"in step 8 agent (\d+)")[0]), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    found = re.search(r"restart 1 of 3 from (\S+)/step-0*\d+ \(in memory\)", text)
    assert found, text
    assert not pathlib.Path(found[1]).exists()


def test_what_it_had_is_gone_with_where_its_ranks_are_ended(run: Run, script) -> None:
    """An agent that ends its job is not followed by one that trains on: from the newest checkpoint, as before. It is
    killed in the moment in which a rank hears of it."""
    name = script("""
        import os, signal, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            raise SystemExit(0)
        agent = os.getppid()
        signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGKILL))
        while os.environ["RANK"] == "1":
            if os.path.exists("up"):
                os.kill(os.getpid(), signal.SIGKILL)
        open("up", "w").close()
        time.sleep(600)
    """)
    ended = run("-n", "2", name)
    assert ended.returncode == 0, ended.stderr
    assert "another one is started in 1 s, once its ranks are gone" in ended.stderr, ended.stderr
    assert "the agent before was killed: restart 1 of 3 from the beginning" in ended.stderr, ended.stderr


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
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = run("-n", "1", "--checkpoint-dir", "kept", "--name", "a", *resume, name)
    assert ended.returncode == 0, ended.stderr
    begun = str(tmp_path / "chosen") if resume else "None"
    assert (tmp_path / "said").read_text().split() == [begun, begun, str(tmp_path / "kept/step-00000003")]
    assert (tmp_path / "runs/a/logs/rank-0.log").read_text().count("==== attempt") == 3
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a"]


def test_where_nobody_starts_another(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    """An agent that was killed in an ending attempt, with no restart left; and one that is the first process itself."""
    name = script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        while os.environ["RANK"] == "1":
            if os.path.exists("up"):
                os.kill(os.getpid(), signal.SIGKILL)
        print("agent", os.getppid(), "process", os.getpid(), flush=True)
        open("up", "w").close()
        time.sleep(600)
    """)
    job = start("-n", "2", "--max-restarts", "0", name)
    (agent,), (rank,) = job.wait_for(r"agent (\d+)"), job.wait_for(r"process (\d+)\n")
    job.wait_for("asked")  # the attempt ends
    os.kill(int(agent), signal.SIGKILL)
    code, text = job.finish()
    assert code == 128 + signal.SIGKILL and not alive(int(rank)), text
    assert f"the job's agent (process {agent}) was ended by SIGKILL, and no restart is left (--max-restarts 0)" in text
    job = start("-n", "1", name, before=["env", "EVENSTEP_RESTART_AGENT=0"])
    (agent,), (rank,) = job.wait_for(r"agent (\d+)"), job.wait_for(r"process (\d+)\n")
    assert int(agent) == job.process.pid
    job.process.kill()
    assert job.finish()[0] == -signal.SIGKILL
    wait_until(lambda: not alive(int(rank)))


def test_restarts_of_agents_are_counted(run: Run, script) -> None:
    name = script("""
        import os, signal, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "1":  # a rank alone, in between
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = run("-n", "1", "--max-restarts", "2", name)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "restart 1 of 2" in ended.stderr and "restart 2 of 2" in ended.stderr
    assert "no restart is left (--max-restarts 2)" in ended.stderr


@pytest.mark.more
def test_restarts_of_agents_count_anew_while_the_ranks_train_on(start, script) -> None:
    """Two more than there are restarts; between one and the next rank 0 makes a step, of which its agent hears."""
    waits = TRAINING.replace("stops -= 1", "stops -= 1\n            time.sleep(1)")
    job = start("-n", "1", "--max-restarts", "1", script(waits), "a", "3", monitor=True)
    for step in (8, 9, 10):
        agent = int(job.wait_for(rf"in step {step} agent (\d+)")[0])
        assert agent > 0
        os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and text.count("its ranks train on") == 3, text


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
    job = start("-n", "1", name)
    job.wait_for("up")
    os.killpg(job.process.pid, number)  # as a terminal does, and schedulers
    job.wait_for("told")
    job.process.send_signal(signal.SIGUSR1)  # behind what was passed on
    code, text = job.finish()
    assert code == 128 + number and words in text
    assert "again: killing" not in text and text.count("told") == 1, text


@pytest.mark.more
def test_while_it_starts(run: Run, start, script, tmp_path: pathlib.Path) -> None:
    name = script(TRAINING)
    assert run("-n", "2", "--no-monitor", name, "whole", "0").returncode == 0
    job = start("-n", "2", "--name", "a", name, "a", "1", monitor=True)
    first = int(job.wait_for(r"in step 8 agent (\d+)")[0])

    before = children(first) | {first}  # its ranks and their guardian are the first process's from its end on
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: children(job.process.pid) - before)
    for pid in children(job.process.pid) - before:
        os.kill(pid, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and text.count("another one is started") == 2, text
    expect_same_end(tmp_path, "a")
    expect_same_processes(tmp_path, "a", 2)


@pytest.mark.more
def test_nothing_is_left_of_a_killed_supervisor(start, script) -> None:
    name = script("""
        import os, time
        print("rank", os.getpid(), "agent", os.getppid(), flush=True)
        time.sleep(600)
    """)
    job = start("-n", "2", "--log-rank", "all", name)
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
    job = start("-n", "1", name)
    job.wait_for("another one is started")
    os.killpg(job.process.pid, signal.SIGINT)
    code, text = job.finish()
    assert code == 130, text


def is_locked(folder: pathlib.Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_what_only_a_start_needs_ends_no_ranks_that_live(start, script, tmp_path: pathlib.Path) -> None:
    """Script, profile and port are gone when the next agent begins. A signal while there is none ends them as ever.

    Nobody else has the run folder meanwhile.
    """
    name = script("""
        import signal, sys, time

        def end(*_):
            print("told", flush=True)
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
    """)
    device = {"name": "cpu", "cpus": [0], "relative_score": 1, "model": "another machine's"}
    (tmp_path / "profile").write_text(json.dumps({"format": "evenstep-profile-1", "devices": [device]}))
    address = ("127.0.0.1", free_port())
    job = start("-n", "1", "--name", "a", "--profile", "profile", "--port", str(address[1]), name, monitor=True)
    job.wait_for("up")
    first = job.process.pid
    for number in (1, 2):
        agent = json.loads((tmp_path / "runs/a/agent.json").read_text())["pid"]
        if number == 1:
            os.kill(first, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        if number == 1:
            assert end_soon([agent])
            assert is_locked(tmp_path / "runs/a")
            taken = socket.create_server(address)
            (tmp_path / name).unlink()
            (tmp_path / "profile").write_text("half")
            os.kill(first, signal.SIGCONT)
        job.wait_for("another one is started now" if number == 1 else "another one is started in 2 s")
        if number == 1:
            job.wait_for("rank 0 trains on")
    job.process.send_signal(signal.SIGTERM)
    code, text = job.finish()
    taken.close()
    assert code == 128 + signal.SIGTERM and "told" in text, text
    assert "evenstep: profile is not valid JSON" in text and not is_locked(tmp_path / "runs/a"), text


@pytest.mark.more
def test_a_signal_to_the_agent_alone_ends_the_job(start, script) -> None:
    name = script("""
        import os, time
        print("agent", os.getppid(), flush=True)
        time.sleep(600)
    """)
    job = start("-n", "1", name)
    os.kill(int(job.wait_for(r"agent (\d+)")[0]), signal.SIGTERM)
    code, text = job.finish()
    assert code == 128 + signal.SIGTERM and "another one" not in text


def test_closed_output_is_nobodys(program, script, tmp_path: pathlib.Path) -> None:
    """What the two processes share must not have the number of the stream to which a rank's lines are written."""
    name = script(
        AGENT
        + """
import signal, time
for said in range(1, 31):  # the agent writes the first ones out before it has read the last
    print("x" * 100, flush=True)
    while open(os.environ["EVENSTEP_RUN_DIR"] + "/logs/rank-0.log").read().count("x" * 100) < said:
        time.sleep(0.01)
first = agent()
os.kill(first, signal.SIGKILL)
while agent() in (0, first):
    time.sleep(0.01)
"""
    )
    words = ["sh", "-c", 'exec "$0" "$@" >&-', str(program), "run", "-n", "1", "--name", "a", str(name)]
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=150)
    assert done.returncode == 0 and "rank 0 trains on" in done.stderr, done.stderr
    assert "restart" not in done.stderr, done.stderr


@pytest.mark.parametrize("why", ["asked", "no restart", "refused"])
def test_ranks_end_without_their_guardian(start, script, tmp_path: pathlib.Path, why: str) -> None:
    """The agent and the guardian are killed, and nobody goes on with the ranks: the first process ends them."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    name = script("""
        import os, time
        print("rank", os.getpid(), "agent", os.getppid(), flush=True)
        time.sleep(600)
    """)
    job = start("-n", "1", "--max-restarts", "1" if why == "refused" else "0", "--python", str(python), name)
    rank, agent = map(int, job.wait_for(r"rank (\d+ agent \d+)\n")[0].split(" agent "))
    first = job.process.pid
    os.kill(first, signal.SIGSTOP)
    for pid in (children(first) | children(agent)) - {rank, agent}:
        os.kill(pid, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    if why == "asked":
        os.kill(first, signal.SIGTERM)
    python.unlink()  # the next agent's first question
    os.kill(first, signal.SIGCONT)
    codes = {"asked": 128 + signal.SIGTERM, "no restart": 128 + signal.SIGKILL}
    code, text = job.finish()
    assert (code == codes[why]) if why in codes else code not in (0, *codes.values()), text
    assert not alive(rank)


def test_the_option_of_earlier_versions_is_taken(program: pathlib.Path) -> None:
    """It asked for what is so by itself now."""
    words = [str(program), "run", "--restart-agent"]
    assert "restart-agent" not in subprocess.run([*words, "--help"], capture_output=True, text=True, check=True).stdout
    done = subprocess.run([*words, "none.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "none.py does not exist" in done.stderr
