"""`evenstep run --hosts auto`: jobs whose processes another program started once a host. One machine plays the hosts, over
loopback; mpirun's are real (EVENSTEP_TEST_MPIRUN), Slurm's variables are set by hand."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Set

import pytest
from run_jobs import Job, alive, children, end_all, end_soon
from test_mpi import FOUND, NONE, QUIET, TORCHRUN
from test_run_hosts import SAYS_ITS_PLACE

Script = Callable[..., str]


class Launched:
    """Starts the processes of a job, as a launcher does on each host."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path, environment: dict[str, str]) -> None:
        self.program, self.folder = program, folder
        self.environment = {name: value for name, value in environment.items() if name not in TORCHRUN} | {
            "NO_COLOR": "1"
        }
        self.jobs: list[Job] = []

    def command(self, *words: str) -> list[str]:
        return [str(self.program), "run", "--hosts", "auto", "-n", "1", "--no-monitor", *words]

    def start(self, command: list[str], **variables: str) -> Job:
        self.jobs.append(Job(command, self.folder, self.environment | variables))
        return self.jobs[-1]

    def place(self, rank: int, *words: str, count: int = 2, **variables: str) -> Job:
        own = {"EVENSTEP_HOST_RANK": str(rank), "EVENSTEP_HOST_COUNT": str(count), "EVENSTEP_HOST_JOB": "test"}
        return self.start(self.command(*words), **own | variables)

    def both(self, *words: str, **variables: str) -> list[Job]:
        return [self.place(rank, *words, **variables) for rank in range(2)]

    def of_slurm(self, *words: str, **variables: str) -> list[Job]:
        slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
        variables = slurm | variables
        return [self.start(self.command(*words), **variables, SLURM_PROCID=str(rank)) for rank in range(2)]

    def meeting(self) -> list[str]:
        return [each.name for each in self.folder.glob(".evenstep*")]


@pytest.fixture
def launched(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Iterator[Launched]:
    made = Launched(program, tmp_path, environment)
    yield made
    end_all(made.jobs)


# Says its place and waits, in the first attempt, until it is ended.
WAITING = """
    echo "rank $RANK of $WORLD_SIZE host $GROUP_RANK attempt $TORCHELASTIC_RESTART_COUNT process $$"
    echo "agent of rank $RANK: process $PPID"
    echo "key ${EVENSTEP_JOB_KEY-none} place ${EVENSTEP_HOST_RANK-none}${PMI_RANK-}${OMPI_COMM_WORLD_RANK-}"
    if [ "$TORCHELASTIC_RESTART_COUNT" = 0 ]; then exec sleep 600; fi
"""
SHELL = ("--no-python", "--log-rank", "all")


@pytest.fixture
def waiting(script: Script, tmp_path: pathlib.Path) -> str:
    name = script("#!/bin/sh\n" + WAITING.replace("\n    ", "\n"), "wait.sh")
    (tmp_path / name).chmod(0o755)
    return f"./{name}"


def processes(job: Job, count: int = 2) -> list[int]:
    words = rf"of {count} host \d attempt 0 process (\d+)"
    return [int(job.wait_for(f"rank {rank} {words}")[0]) for rank in range(count)]


@pytest.mark.parametrize(
    "mpirun", [*FOUND[:1], *(pytest.param(each, marks=pytest.mark.more) for each in FOUND[1:])] or [NONE]
)
def test_two_hosts_of_mpirun_train_as_one_device_does(
    launched: Launched, script: Script, tmp_path: pathlib.Path, mpirun: str
) -> None:
    assert mpirun, "EVENSTEP_TEST_REQUIRE has mpi, but no mpirun is found: set EVENSTEP_TEST_MPIRUN"
    words = launched.command("--no-pin", "--log-rank", "all", "--name", "a", script(SAYS_ITS_PLACE))
    code, text = launched.start([mpirun, "-n", "2", *words], **QUIET).finish()
    assert code == 0, text
    for rank in range(2):
        assert re.search(rf"\[rank {rank}[^\]]*\] place {rank} 0 1 2 {rank} 2 ", text), text
        found = re.search(rf"\[rank {rank}[^\]]*\] apart (\S+) after 18 steps", text)
        assert found and float(found[1]) < 1e-12, text
        assert "apart" in (tmp_path / f"runs/a/logs/rank-{rank}.log").read_text()
    assert launched.meeting() == []


@pytest.mark.parametrize("mpirun", FOUND or [NONE])
def test_what_a_rank_ends_with_mpirun_ends_with(launched: Launched, waiting: str, mpirun: str) -> None:
    assert mpirun
    words = launched.command("--max-restarts", "0", *SHELL, waiting)
    job = launched.start([mpirun, "-n", "2", *words], **QUIET)
    ranks = processes(job)
    assert job.wait_for("(key none place none)\n", times=2)
    os.kill(ranks[1], signal.SIGKILL)
    code, text = job.finish()
    assert code == 137, text
    assert "was killed by SIGKILL" in text
    assert end_soon(ranks) and launched.meeting() == []


def test_a_rank_that_is_killed_restarts_all_and_the_followers_end_with_0(launched: Launched, waiting: str) -> None:
    key = "ab" * 32
    leader, follower = launched.both("--max-restarts", "1", *SHELL, waiting, EVENSTEP_JOB_KEY=key)
    ranks = processes(leader)
    os.kill(ranks[1], signal.SIGKILL)
    code, text = leader.finish()
    assert code == 0, text
    assert follower.finish() == (0, "")
    host = re.search(r"rank 1 on (\S+)\]", text)
    assert host and f"(cpu on {host[1]}, process {ranks[1]}) was killed by SIGKILL" in text, text
    assert host[1].endswith("#1")  # one machine plays both
    assert text.count("attempt 1 process") == 2 and key not in text
    assert launched.meeting() == []


def test_a_follower_that_is_killed_is_waited_for(launched: Launched, waiting: str) -> None:
    leader, follower = launched.both("--max-restarts", "1", *SHELL, waiting)
    ranks = processes(leader)
    os.kill(follower.process.pid, signal.SIGKILL)
    leader.wait_for("its agent is waited for again")
    again = launched.place(1, "--max-restarts", "1", *SHELL, waiting)
    code, text = leader.finish()
    assert code == 0, text
    assert again.finish() == (0, "")
    follower.finish()
    assert "is lost" in text and text.count("attempt 1 process") == 2
    assert end_soon(ranks)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"EVENSTEP_RESTART_AGENT": "0"}, "only what started its agent can start another"),
        pytest.param({"EVENSTEP_HOSTS_PATIENCE": "30"}, "its agent did not come here", marks=pytest.mark.more),
    ],
)
def test_of_slurm_a_lost_host_ends_the_job(
    launched: Launched, waiting: str, variables: dict[str, str], said: str
) -> None:
    leader, follower = launched.of_slurm("--max-restarts", "1", *SHELL, waiting, **variables)
    ranks = processes(leader)
    os.kill(follower.process.pid, signal.SIGKILL)
    code, text = leader.finish()
    assert code == 7, text
    assert said in text
    follower.finish()
    assert end_soon(ranks) and launched.meeting() == []


def kill_agent(job: Job, rank: int) -> str:
    agent = job.wait_for(rf"agent of rank {rank}: process (\d+)")[0]
    os.kill(int(agent), signal.SIGKILL)
    return f"agent (process {agent}) was ended by SIGKILL: another one is started in 1 s, once its ranks are gone"


# Ranks do not outlast their agent so.
ALONE = {"EVENSTEP_RESTART_AGENT": "anew"}


@pytest.mark.parametrize("rank", range(2))
def test_an_agent_that_is_killed_is_started_again(launched: Launched, waiting: str, rank: int) -> None:
    leader, follower = launched.of_slurm("--max-restarts", "1", "--name", "a", *SHELL, waiting, **ALONE)
    ranks = processes(leader)
    said = kill_agent(leader, rank)
    code, text = leader.finish()
    assert code == 0, text
    code, there = follower.finish()
    assert code == 0, there
    assert (("the job's " if rank == 0 else "this host's ") + said) in (text, there)[rank]
    assert ("the leader of this job is lost" in there) == (rank == 0), there
    if rank == 0:
        assert "the agent before was killed: restart 1 of 1 from the beginning" in text
    else:
        assert "its agent is waited for again" in text and "restart 1 of 1" in text
    assert text.count("attempt 1 process") == 2
    assert end_soon(ranks) and launched.meeting() == []


@pytest.mark.more
@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("mpirun", FOUND or [NONE])
def test_of_mpirun_an_agent_that_is_killed_is_started_again(
    launched: Launched, waiting: str, mpirun: str, rank: int
) -> None:
    assert mpirun
    words = launched.command("--max-restarts", "1", *SHELL, waiting)
    job = launched.start([mpirun, "-n", "2", *words], **QUIET, **ALONE)
    ranks = processes(job)
    said = kill_agent(job, rank)
    code, text = job.finish()
    assert code == 0, text
    assert said in text and text.count("attempt 1 process") == 2
    assert end_soon(ranks) and launched.meeting() == []


# Says what it is asked for, and which signals came, and stays until it is told to end.
STAYING = """
    trap 'echo "rank $RANK got USR1"' USR1
    echo "rank $RANK of $WORLD_SIZE host $GROUP_RANK attempt $TORCHELASTIC_RESTART_COUNT process $$"
    asked=1
    until [ -e told ]; do
        if [ -e ask-$asked ]; then echo "rank $RANK heard $asked"; asked=$((asked + 1)); fi
        sleep 0.05
    done
    echo "rank $RANK ends in attempt $TORCHELASTIC_RESTART_COUNT"
"""


@pytest.fixture
def staying(script: Script, tmp_path: pathlib.Path) -> str:
    name = script("#!/bin/sh\n" + STAYING.replace("\n    ", "\n"), "stay.sh")
    (tmp_path / name).chmod(0o755)
    return f"./{name}"


def ask(launched: Launched, leader: Job, number: int, count: int = 2) -> None:
    """All that was said before was heard by the leader's agent then, and it has looked how all stands."""
    (launched.folder / f"ask-{number}").touch()
    for rank in range(count):
        leader.wait_for(f"rank {rank} heard {number}\n")


def agent_of(job: Job, before: Set[int] = frozenset()) -> int:
    """`before`: what agents that were killed have left to their first process."""
    (agent,) = children(job.process.pid) - before
    return agent


def kill_twice(launched: Launched, leader: Job, host: Job, told: str) -> list[int]:
    """The agent of that host, while its ranks train on, and the second time a rank stands still, and a signal is on its way
    to another host's; the ranks' processes."""
    ranks = processes(leader)
    before: set[int] = set()
    leader.process.send_signal(signal.SIGUSR1)
    for rank in (0, 1):
        leader.wait_for(f"rank {rank} got USR1")
    for number in (1, 2):
        ask(launched, leader, number)
        agent = agent_of(host, before)
        before |= children(agent) | {agent}
        if number == 2:  # of this the agent that is killed hears nothing
            os.kill(agent, signal.SIGSTOP)
            os.kill(ranks[1], signal.SIGSTOP)
        if number == 2 and host is not leader:
            leader.process.send_signal(signal.SIGUSR1)
            leader.wait_for("rank 0 got USR1", times=2)
        os.kill(agent, signal.SIGKILL)
        leader.wait_for(told, times=number)
    leader.wait_for(rf"rank 1 \(process {ranks[1]}\) stands still: it was stopped by SIGSTOP")
    os.kill(ranks[1], signal.SIGCONT)
    ask(launched, leader, 3)
    assert all(map(alive, ranks))
    return ranks


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (Launched.of_slurm, ()),
        (Launched.of_slurm, ("--recovery", "replace")),
        pytest.param(Launched.both, (), marks=pytest.mark.more),
    ],
)
def test_ranks_of_all_hosts_outlast_a_killed_leader(
    launched: Launched, staying: str, start: Callable[..., list[Job]], words: tuple[str, ...]
) -> None:
    leader, follower = start(launched, "--name", "a", *words, *SHELL, staying)
    kill_twice(launched, leader, leader, "the agent before was killed: ranks 0 and 1 train on")
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert follower.finish() == (0, "")
    assert text.count("attempt 0 process") == 2 and text.count("ends in attempt 0") == 2
    assert text.count("got USR1") == 2
    assert launched.meeting() == []


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (Launched.of_slurm, ("--recovery", "shrink")),  # whose others cannot: such scripts say nothing of it
        pytest.param(Launched.both, (), marks=pytest.mark.more),
    ],
)
def test_ranks_outlast_a_killed_agent_of_another_host(
    launched: Launched, staying: str, start: Callable[..., list[Job]], words: tuple[str, ...]
) -> None:
    """Twice; what becomes of them meanwhile the leader hears of the next one, which does its part of what follows."""
    leader, follower = start(launched, "--name", "a", *words, *SHELL, staying)
    told = "its agent was killed, and another one goes on with its 1 rank"
    ranks = kill_twice(launched, leader, follower, told)
    leader.wait_for("rank 1 got USR1", times=2)
    os.kill(ranks[0], signal.SIGKILL)
    for rank in range(2):
        leader.wait_for(f"rank {rank} of 2 host {rank} attempt 1 process")
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    code, there = follower.finish()
    assert code == 0 and there.count("and its ranks train on") == 2, there
    assert text.count("attempt 0 process") == 2 and text.count("ends in attempt 1") == 2
    assert text.count("got USR1") == 4  # none twice
    assert "is lost" not in text and launched.meeting() == []


def test_a_host_leaves_after_anothers_agent_was_killed(launched: Launched, staying: str) -> None:
    """Of the next attempt the agent that went on with ranks opens its part anew."""
    words = ("--name", "a", "--no-replace-leader", *SHELL, staying)
    leader, follower, _ = places = [launched.place(rank, *words, count=3) for rank in range(3)]
    for rank in range(3):
        leader.wait_for(f"rank {rank} of 3 host {rank} attempt 0 process")
    ask(launched, leader, 1, 3)
    os.kill(agent_of(follower), signal.SIGKILL)
    leader.wait_for("its agent was killed, and another one goes on with its 1 rank")
    name = re.search(r"rank 2 on (\S+)\]", leader.seen.decode())
    assert name
    leave = launched.start([str(launched.program), "drain", "--run", "a", "--no-move", "--cold", name[1]])
    leader.wait_for(f"host {name[1]} is drained")
    os.kill(processes(leader, 3)[0], signal.SIGKILL)
    for rank in range(2):
        leader.wait_for(f"rank {rank} of 2 host {rank} attempt 1 process")
    (launched.folder / "told").touch()
    for job in (*places, leave):
        code, text = job.finish()
        assert code == 0, text


@pytest.mark.more
def test_agents_of_all_hosts_may_be_killed_together(launched: Launched, staying: str) -> None:
    """The other host's next one comes before the leader's is there."""
    leader, follower = launched.of_slurm("--name", "a", *SHELL, staying)
    ranks = processes(leader)
    ask(launched, leader, 1)
    os.kill(leader.process.pid, signal.SIGSTOP)  # it starts none yet
    os.kill(agent_of(leader), signal.SIGKILL)
    os.kill(agent_of(follower), signal.SIGKILL)
    follower.wait_for("and its ranks train on")
    os.kill(leader.process.pid, signal.SIGCONT)
    leader.wait_for("the agent before was killed: ranks 0 and 1 train on")
    ask(launched, leader, 2)
    assert all(map(alive, ranks))
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert text.count("ends in attempt 0") == 2 and follower.finish()[0] == 0


@pytest.mark.more
def test_ctrl_c_reaches_ranks_whose_agent_is_away(launched: Launched, staying: str) -> None:
    words = ("--name", "a", "--checkpoint-memory", "5", "--memory-copies", "0", *SHELL, staying)
    leader, follower = launched.of_slurm(*words)
    ranks = processes(leader)
    ask(launched, leader, 1)
    os.kill(follower.process.pid, signal.SIGSTOP)  # it starts none yet
    os.kill(agent_of(follower), signal.SIGKILL)
    leader.process.send_signal(signal.SIGINT)
    assert end_soon(ranks[:1]) and alive(ranks[1])
    os.kill(follower.process.pid, signal.SIGCONT)
    code, text = leader.finish()
    assert code == 130 and "another one goes on with its 1 rank" in text, text
    assert follower.finish()[0] == 0 and end_soon(ranks)


def test_ranks_of_a_leader_end_without_their_guardian(launched: Launched, staying: str) -> None:
    """It is killed with the agent, and no other agent goes on with them."""
    leader, _ = launched.of_slurm("--name", "a", "--max-restarts", "0", *SHELL, staying)
    ranks = processes(leader)
    agent, first = agent_of(leader), leader.process.pid
    os.kill(first, signal.SIGSTOP)
    os.kill(agent, signal.SIGSTOP)  # it starts no other guardian
    for pid in children(agent) - {ranks[0]}:
        os.kill(pid, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    os.kill(first, signal.SIGCONT)
    assert leader.finish()[0] == 128 + signal.SIGKILL
    assert not alive(ranks[0])
    assert end_soon(ranks[1:])  # its agent, which has heard of no end, looks for another leader


def test_a_rank_elsewhere_that_ends_while_nobody_leads_is_known_to_the_next(launched: Launched, staying: str) -> None:
    """Of two there one ends, with an error: the job restarts, for that reason, and its host has the same agent."""
    leader, follower = launched.of_slurm("--name", "a", "-n", "2", "--max-restarts", "1", *SHELL, staying)
    pids = [int(leader.wait_for(rf"rank {rank} of 4 .* attempt 0 process (\d+)")[0]) for rank in range(4)]
    (launched.folder / "ask-1").touch()
    for rank in range(4):
        leader.wait_for(f"rank {rank} heard 1\n")
    agent = agent_of(leader)
    os.kill(agent, signal.SIGSTOP)  # it hears of nothing
    os.kill(pids[3], signal.SIGKILL)
    assert end_soon(pids[3:])
    os.kill(agent, signal.SIGKILL)
    leader.wait_for("rank 3 .*was killed by SIGKILL")
    for rank in range(4):
        leader.wait_for(f"rank {rank} of 4 .* attempt 1 process")
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert "the agent before was killed: ranks 0, 1, 2 and 3 train on" in text
    assert follower.finish() == (0, "")


def test_ranks_that_end_while_nobody_leads_have_ended_well(launched: Launched, staying: str) -> None:
    leader, follower = launched.of_slurm("--name", "a", *SHELL, staying)
    ranks = processes(leader)
    ask(launched, leader, 1)
    agent = agent_of(leader)
    os.kill(agent, signal.SIGSTOP)
    (launched.folder / "told").touch()
    assert end_soon(ranks)
    os.kill(agent, signal.SIGKILL)
    code, text = leader.finish()
    assert code == 0, text
    assert "attempt 1" not in text and follower.finish() == (0, "")
    assert "ends in attempt 0" in (launched.folder / "runs/a/logs/rank-1.log").read_text()


@pytest.mark.more
def test_who_does_not_come_to_the_next_agent_has_all_begin_again(launched: Launched, staying: str) -> None:
    leader, follower = launched.of_slurm("--name", "a", *SHELL, staying)
    ranks = processes(leader)
    ask(launched, leader, 1)
    os.kill(follower.process.pid, signal.SIGSTOP)  # it starts none in its agent's place
    os.kill(agent_of(follower), signal.SIGKILL)
    os.kill(agent_of(leader), signal.SIGKILL)
    leader.wait_for("could not go on with its ranks: another one is started in ")
    os.kill(follower.process.pid, signal.SIGCONT)
    for rank in range(2):
        leader.wait_for(f"rank {rank} of 2 host {rank} attempt 1 process")
    assert end_soon(ranks)
    (launched.folder / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert follower.finish()[0] == 0


@pytest.mark.more
def test_ranks_do_not_wait_for_ever_for_an_agent_that_does_not_come(launched: Launched, staying: str) -> None:
    leader, follower = launched.of_slurm("--name", "a", *SHELL, staying, EVENSTEP_HOSTS_PATIENCE="30")
    ranks = processes(leader)
    ask(launched, leader, 1)
    agent = agent_of(leader)
    os.kill(leader.process.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    assert end_soon(ranks[1:]) and alive(ranks[0])
    follower.wait_for("the leader of this job is lost")
    os.kill(leader.process.pid, signal.SIGKILL)
    assert end_soon(ranks)


def test_who_looks_for_a_leader_that_does_not_come_can_be_ended(launched: Launched, waiting: str) -> None:
    leader, follower = launched.of_slurm("--max-restarts", "1", *SHELL, waiting)
    ranks = processes(leader)
    leader.process.kill()
    leader.finish()
    follower.wait_for("the leader of this job is lost")
    assert end_soon(ranks)
    follower.process.terminate()
    assert follower.finish()[0] == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_leaders_end_ends_all(launched: Launched, waiting: str, number: signal.Signals) -> None:
    leader, follower = launched.both(*SHELL, waiting, EVENSTEP_RESTART_AGENT="0")
    ranks = processes(leader)
    leader.process.send_signal(number)
    code, text = follower.finish()  # which also waits for its guardian
    assert code == (0 if number == signal.SIGINT else 7), text
    assert leader.finish()[0] == (130 if number == signal.SIGINT else -number)
    assert end_soon(ranks)


def test_a_file_that_a_killed_leader_left_misleads_nobody(launched: Launched, waiting: str) -> None:
    leader, follower = launched.both(*SHELL, waiting)
    processes(leader)
    leader.process.kill()
    leader.finish()
    follower.process.terminate()
    follower.finish()
    assert launched.meeting() == [".evenstep-test"]
    late = launched.place(1, *SHELL, waiting)  # it finds the old file, and nobody there
    leader = launched.place(0, *SHELL, waiting)
    processes(leader)
    leader.process.send_signal(signal.SIGINT)
    assert leader.finish()[0] == 130 and late.finish()[0] == 0
    assert launched.meeting() == []


def test_without_a_folder_hosts_meet_at_an_address(launched: Launched, waiting: str, free_port: int) -> None:
    key = launched.folder / "key"
    key.write_text("cd" * 32 + "\n")
    key.chmod(0o600)
    words = ("--rendezvous", f"localhost:{free_port}", *SHELL, waiting)
    leader, follower = launched.both(*words, EVENSTEP_JOB_KEY_FILE=str(key))
    processes(leader)
    assert launched.meeting() == []
    leader.process.send_signal(signal.SIGTERM)
    assert leader.finish()[0] == 143 and follower.finish()[0] == 0


def test_who_has_another_key_is_told_so(launched: Launched, waiting: str, free_port: int) -> None:
    words = ("--rendezvous", f"127.0.0.1:{free_port}", *SHELL, waiting)
    leader = launched.place(0, *words, EVENSTEP_JOB_KEY="cd" * 32)
    code, text = launched.place(1, *words, EVENSTEP_JOB_KEY="ce" * 32).finish()
    assert code == 5 and "does not have this job's key" in text and "give all hosts the same key" in text
    leader.process.send_signal(signal.SIGINT)
    assert leader.finish()[0] == 130


def test_a_file_that_others_may_read_is_refused(launched: Launched, waiting: str) -> None:
    path = launched.folder / ".evenstep-test"
    path.write_text('{"key":"' + "ab" * 32 + '","port":1}')
    path.chmod(0o644)
    code, text = launched.place(1, *SHELL, waiting).finish()
    assert code == 5 and "is open to others (mode 0644)" in text
    assert "chmod 600" in text and "the same key" not in text


@pytest.mark.parametrize("words", ["no words of a leader", '{"port":1}'])
def test_what_a_file_says_is_tried_for_as_long_as_hosts_are_waited_for(
    launched: Launched, waiting: str, words: str
) -> None:
    path = launched.folder / ".evenstep-test"
    path.write_text(words)
    path.chmod(0o600)
    code, text = launched.place(1, *SHELL, waiting, EVENSTEP_HOSTS_PATIENCE="1").finish()
    assert code == 7 and "within 1 s: " in text


def test_a_leader_waits_as_long_as_it_is_told(launched: Launched, waiting: str) -> None:
    code, text = launched.place(0, *SHELL, waiting, EVENSTEP_HOSTS_PATIENCE="1").finish()
    assert code == 7 and "its agent did not come here" in text
    code, text = launched.place(0, *SHELL, waiting, EVENSTEP_HOSTS_PATIENCE="soon").finish()
    assert code == 2 and "EVENSTEP_HOSTS_PATIENCE=soon is no time" in text


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({}, [], "nothing here says which host of how many this is"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, [], "a batch script's own"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, [], "PMI_RANK is 2 and PMI_SIZE is 2"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["--ssh", "rsh"], "--ssh is not of --hosts auto"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["--devices", "cpu:0"], "--devices names devices of this host"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["--rendezvous", "127.0.0.1:7"], "the hosts have no key in common"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["--rendezvous", "missing"], "--rendezvous missing is no folder"),
    ],
)
def test_wrong_words_are_told_at_once(
    launched: Launched, script: Script, variables: dict[str, str], words: list[str], said: str
) -> None:
    command = [str(launched.program), "run", "--hosts", "auto", *words, script("", "t.py")]
    result = subprocess.run(
        command, cwd=launched.folder, env=launched.environment | variables, capture_output=True, text=True, timeout=150
    )
    assert result.returncode in (2, 3) and said in result.stderr, result.stderr
