"""Jobs whose hosts change while they run: `evenstep drain`, `evenstep join`, hosts that are lost with --min-ranks."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator

import pytest
from run_jobs import Job, end_all, end_soon, go_without, write_checkpoint
from test_drain import TRAINING
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture
from test_run_launched import Launched
from test_run_launched import launched as launched  # a fixture

Script = Callable[..., str]

KEY = "ab" * 32


def ends_the_same(text: str, ranks: int) -> None:
    found = re.findall(r"apart (\S+) after 18 steps", text)
    assert len(found) == ranks and max(float(one) for one in found) < 1e-12, text


# Says its place, and waits to be ended, but for the attempt that FREE names.
WAITING = """#!/bin/sh
echo "rank $RANK of $WORLD_SIZE attempt $TORCHELASTIC_RESTART_COUNT process $$"
if [ "$TORCHELASTIC_RESTART_COUNT" = "$FREE" ]; then exit 0; fi
exec sleep 600
"""


@pytest.fixture
def waiting(script: Script, tmp_path: pathlib.Path) -> str:
    name = script(WAITING, "wait.sh")
    (tmp_path / name).chmod(0o755)
    return f"./{name}"


class Alone:
    """A job on one machine, whose other hosts join over loopback."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path, environment: dict[str, str]) -> None:
        self.program, self.folder = str(program), folder
        self.environment = environment | {"EVENSTEP_JOB_KEY": KEY, "NO_COLOR": "1"}
        self.jobs: list[Job] = []

    def start(self, *words: str, host: str = "a", **variables: str) -> Job:
        own = self.environment | {"EVENSTEP_HOST_ID": host} | variables
        self.jobs.append(Job([self.program, *words], self.folder, own))
        return self.jobs[-1]

    def run(self, *words: str, **variables: str) -> Job:
        own = ("-n", "1", "--no-pin", "--no-monitor", "--name", "a", "--log-rank", "all", "--address", "127.0.0.1")
        return self.start("run", *own, *words, **variables)

    def join(self, job: Job, *words: str, host: str = "b", **variables: str) -> Job:
        (where,) = job.wait_for(r"hosts join at (127.0.0.1:\d+) ")
        return self.start("join", *words, where, host=host, **variables)


@pytest.fixture
def alone(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Iterator[Alone]:
    made = Alone(program, tmp_path, environment)
    yield made
    end_all(made.jobs)


def test_who_may_not_join_is_told_why(alone: Alone, waiting: str, tmp_path: pathlib.Path) -> None:
    job = alone.run("--max-ranks", "2", "--no-python", waiting)
    job.wait_for("rank 0 of 1 attempt 0")

    def refused(code: int, said: str, *words: str, **variables: str) -> None:
        ended, text = alone.join(job, *words, **variables).finish()
        assert ended == code and said in text, text

    refused(5, "give this host the job's key", EVENSTEP_JOB_KEY="cd" * 32)
    refused(2, "this host does not have the job's key", EVENSTEP_JOB_KEY="")
    refused(8, "2 ranks do not fit: the job takes 1 more (--max-ranks 2)", "-n", "2")
    refused(8, "this host is in the job already", "-n", "1", host="a")
    first = alone.join(job, "-n", "1")
    job.wait_for("has come with 1 rank")
    refused(8, "the job is full", "-n", "1", host="c")

    def undrained(code: int, said: str, *words: str) -> None:
        ended, text = alone.start("drain", *words).finish()
        assert ended == code and said in text, text

    undrained(3, "the job has no host nowhere", "--run", "a", "nowhere")
    undrained(8, "leads the job: it cannot be drained", "--run", "a", os.uname().nodename)
    undrained(3, "there is no run in the folder runs", "nowhere")
    undrained(2, "no host was named")
    control = tmp_path / "runs/a/control"
    assert control.stat().st_mode & 0o777 == 0o600
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.finish()[0] == 143
    code, text = first.finish()
    assert code == 8 and "the job has ended" in text
    assert not control.exists()


def drain_of(hosts: Hosts, host: str, *words: str) -> Job:
    command = ["ip", "netns", "exec", hosts.names[0], str(hosts.program), "drain", "--run", "a", *words, host]
    hosts.jobs.append(Job(command, hosts.folder, hosts.environment))
    return hosts.jobs[-1]


def test_a_host_is_drained_and_the_job_goes_on(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    here, there = hosts.names
    job = hosts.start("--name", "a", "--max-restarts", "0", "--log-rank", "all", script(TRAINING), monitor=True)
    job.wait_for("at step 8", times=2)
    (agent,) = hosts.agents()
    drain = drain_of(hosts, there, "--no-move", "--cold")
    job.wait_for(f"host {there} is drained: the training saves its state after the step under way")
    (tmp_path / "told").touch()
    code, text = drain.finish()
    assert code == 0, text
    assert f"host {there} is out of the job, and its agent has ended; the job goes on with 1 rank" in text
    assert end_soon([agent])
    code, text = job.finish()
    assert code == 0, text
    assert re.search(r"the hosts change: the job goes on from \S+/step-0000000(8|9)\n", text), text
    assert f"1 rank on 1 host: {here} 1" in text and "Traceback" not in text
    ends_the_same(text, 1)
    with sqlite3.connect(tmp_path / "runs/a/run.db") as database:
        steps = dict(database.execute("SELECT rank, COUNT(DISTINCT step) FROM steps GROUP BY rank").fetchall())
        assert steps[0] == 18 and steps[1] in (9, 10)
        assert database.execute("SELECT value FROM meta WHERE key = 'ranks'").fetchall() == [("1",)]


def test_a_host_joins(alone: Alone, script: Script, tmp_path: pathlib.Path) -> None:
    job = alone.run("--max-ranks", "2", "--max-restarts", "0", script(TRAINING))
    job.wait_for("at step 8")
    join = alone.join(job, "-n", "1")
    job.wait_for("has come with 1 rank: it joins when the training has saved its state")
    (tmp_path / "told").touch()
    code, text = job.finish()
    assert code == 0, text
    assert "2 ranks on 2 hosts" in text
    ends_the_same(text, 2)
    code, text = join.finish()
    assert code == 0 and "this host takes part: rank 1 of 2" in text


def test_who_joined_takes_part_in_a_restart_and_is_left_out_when_it_is_lost(alone: Alone, waiting: str) -> None:
    job = alone.run("--max-ranks", "3", "--max-restarts", "2", "--no-python", waiting, FREE="2")
    (first,) = job.wait_for(r"rank 0 of 1 attempt 0 process (\d+)")
    join = alone.join(job, "-n", "2")
    job.wait_for("has come with 2 ranks")
    os.kill(int(first), signal.SIGKILL)
    job.wait_for(r"rank \d of 3 attempt 1 process", times=3)
    join.wait_for("this host takes part: ranks 1 and 2 of 3")
    join.process.kill()
    code, text = job.finish()
    assert code == 0, text
    assert "is left out: it came by itself, and may join again" in text
    assert "restart 2 of 2" in text and "rank 0 of 1 attempt 2" in text


def lose(hosts: Hosts, job: Job) -> None:
    """The other host's agent is killed, and none can be started there again."""
    job.wait_for(r"rank \d of 2 attempt 0", times=2)
    (agent,) = hosts.agents()
    pathlib.Path(hosts.folder / "shell.sh").write_text("#!/bin/sh\necho No route to host >&2\nexit 255\n")
    os.kill(agent, signal.SIGKILL)


def test_a_job_goes_on_without_a_host_that_is_lost(hosts: Hosts, waiting: str) -> None:
    hosts.environment = hosts.environment | {"FREE": "1"}
    job = hosts.start("--min-ranks", "1", "--max-restarts", "1", "--log-rank", "all", "--no-python", waiting)
    lose(hosts, job)
    code, text = job.finish()
    assert code == 0, text
    assert re.search(f"host {hosts.names[1]} is left out: .*No route to host", text)
    assert "restart 1 of 1" in text and "rank 0 of 1 attempt 1" in text
    assert f"1 rank on 1 host: {hosts.names[0]} 1" in text


def test_with_too_few_ranks_it_waits_for_a_host_to_join(hosts: Hosts, waiting: str) -> None:
    there = hosts.names[1]
    hosts.environment = hosts.environment | {"EVENSTEP_JOB_KEY": KEY, "FREE": "1"}
    words = ("--min-ranks", "2", "--max-ranks", "2", "--max-restarts", "1", "--log-rank", "all", "--no-python", waiting)
    job = hosts.start(*words)
    lose(hosts, job)
    (where,) = job.wait_for(r"1 rank is left, and --min-ranks is 2: the job waits, .*: evenstep join (\S+)")
    joining = ["ip", "netns", "exec", there, "env", f"EVENSTEP_HOST_ID={there}", str(hosts.program), "join", "-n", "1"]
    hosts.jobs.append(join := Job([*joining, where], hosts.folder, hosts.environment))
    code, text = job.finish()
    assert code == 0, text
    assert len(re.findall(r"rank \d of 2 attempt 1", text)) == 2
    assert join.finish()[0] == 0


def with_too_few(hosts: Hosts, waiting: str, *words: str, **variables: str) -> Job:
    hosts.environment = hosts.environment | {"FREE": "1"} | variables
    all_words = ("--name", "a", "--min-ranks", "2", "--max-restarts", "1", "--log-rank", "all", *words)
    job = hosts.start(*all_words, "--no-python", waiting)
    lose(hosts, job)
    return job


def test_with_too_few_ranks_it_waits_for_its_host_to_be_back(
    hosts: Hosts, waiting: str, tmp_path: pathlib.Path
) -> None:
    write_checkpoint(tmp_path / "saved/step-00000007")
    there = hosts.names[1]
    job = with_too_few(hosts, waiting, "--checkpoint-dir", "saved", "--resume", "auto")
    job.wait_for(
        rf"1 rank is left, and --min-ranks is 2: the job waits, saved in \S+/step-00000007, until {there} is back"
    )
    job.wait_for(rf"host {there} does not come back: .*No route to host.*; its agent is started again in 2 s")
    hosts.shell()
    code, text = job.finish()
    assert code == 0, text
    assert f"host {there} is back" in text and "restart 1 of 1" in text
    assert len(re.findall(r"rank \d of 2 attempt 1", text)) == 2


@pytest.mark.parametrize("notice", [False, True])
def test_who_waits_for_hosts_is_ended_by_a_signal(hosts: Hosts, waiting: str, notice: bool) -> None:
    job = with_too_few(hosts, waiting, *(("--notice", "60") if notice else ()))
    job.wait_for("the job waits, until ")
    os.kill(job.process.pid, signal.SIGUSR1 if notice else signal.SIGINT)
    code, text = job.finish()
    assert code == (75 if notice else 130), text
    assert ("SIGUSR1: no ranks run, and the training has saved nothing yet" if notice else "was interrupted") in text


@pytest.mark.parametrize("seconds", ["0", "0.5"])
def test_with_too_few_ranks_it_waits_no_longer_than_it_is_told(hosts: Hosts, waiting: str, seconds: str) -> None:
    job = with_too_few(hosts, waiting, EVENSTEP_MIN_RANKS_PATIENCE=seconds)
    code, text = job.finish()
    assert code == 7, text
    assert "1 rank is left on the hosts that can be reached, and --min-ranks is 2" in text
    said = ("no others came within 0.5 s (EVENSTEP", "waits, up to 0.5 s (EVENSTEP_MIN_RANKS_PATIENCE), until")
    assert all(words in text for words in said) == (seconds == "0.5"), text


def test_a_host_with_notice_is_drained_alone(launched: Launched, waiting: str) -> None:
    """These ranks save nothing: when its time is over the job restarts, without that host."""
    words = ("--notice", "0.2", "--min-ranks", "1", "--max-restarts", "1", "--log-rank", "all", "--no-python", waiting)
    leader, follower = launched.both(*words, FREE="1")
    leader.wait_for(r"rank \d of 2 attempt 0", times=2)
    os.kill(follower.process.pid, signal.SIGTERM)
    code, text = leader.finish()
    assert code == 0, text
    assert re.search(
        r"host \S+#1: SIGTERM: the training saves its state .* goes on with 1 rank without that host", text
    )
    assert "the time of --notice is over" in text and "rank 0 of 1 attempt 1" in text
    assert follower.finish()[0] == 0


def test_a_host_whose_end_is_announced_is_drained_alone(
    launched: Launched, waiting: str, tmp_path: pathlib.Path
) -> None:
    """Each host asks for its own. These ranks save nothing: when the time is over the job restarts, without that host."""
    place = 'exec:test "$PLAYED" = 1 && test -e ending && echo 0.3'
    words = (
        "--notice-from",
        place,
        "--min-ranks",
        "1",
        "--max-restarts",
        "1",
        "--log-rank",
        "all",
        "--no-python",
        waiting,
    )
    variables = {"FREE": "1", "EVENSTEP_NOTICE_EVERY": "0.1"}
    leader, follower = (launched.place(rank, *words, PLAYED=str(rank), **variables) for rank in range(2))
    leader.wait_for(r"rank \d of 2 attempt 0", times=2)
    (tmp_path / "ending").touch()
    code, text = leader.finish()
    assert code == 0, text
    assert re.search(
        r"host \S+#1: exec announces the machine's end \(exit code 0\): the training saves its state after the step under "
        r"way, within 0\.[123] s \(--notice-from\), and goes on with 1 rank without that host",
        text,
    ), text
    assert text.count("announces") == 1 and "rank 0 of 1 attempt 1" in text
    assert follower.finish()[0] == 0


@pytest.mark.more
def test_an_end_is_announced_while_ranks_are_waited_for(
    launched: Launched, waiting: str, tmp_path: pathlib.Path
) -> None:
    """That of another host, which leaves, and then that of the one that leads, which ends the job. The lost one's agent
    is waited for first, for two minutes."""
    limits = ("--min-ranks", "3", "--max-ranks", "3", "--max-restarts", "1")
    words = ("--notice-from", "exec:test -e ending-$PLAYED", *limits, "--log-rank", "all", "--no-python", waiting)
    variables = {"EVENSTEP_NOTICE_EVERY": "0.1", "EVENSTEP_JOB_KEY": KEY}
    leader, follower, lost = (launched.place(rank, *words, count=3, PLAYED=str(rank), **variables) for rank in range(3))
    leader.wait_for(r"rank \d of 3 attempt 0", times=3)
    lost.process.kill()
    leader.wait_for("2 ranks are left, and --min-ranks is 3: the job waits")
    (tmp_path / "ending-1").touch()
    leader.wait_for(r"host \S+#1 is left out: it has notice \(exec announces the machine's end \(exit code 0\)\)")
    assert follower.finish()[0] == 0
    (tmp_path / "ending-0").touch()
    code, text = leader.finish()
    assert code == 75, text
    assert "exec announces the machine's end (exit code 0): no ranks run, and the training has saved nothing" in text


@pytest.mark.more
def test_a_host_with_notice_leaves_and_the_training_goes_on(
    launched: Launched, script: Script, tmp_path: pathlib.Path
) -> None:
    words = ("--notice", "120", "--min-ranks", "1", "--max-restarts", "0", "--no-pin", "--log-rank", "all")
    leader, follower = launched.both(*words, script(TRAINING))
    leader.wait_for("at step 8", times=2)
    os.kill(follower.process.pid, signal.SIGTERM)
    leader.wait_for("goes on with 1 rank without that host")
    (tmp_path / "told").touch()
    code, text = leader.finish()
    assert code == 0, text
    ends_the_same(text, 1)
    assert follower.finish()[0] == 0


@pytest.mark.more
def test_notice_in_the_pause_before_a_restart_is_kept(
    launched: Launched, script: Script, tmp_path: pathlib.Path
) -> None:
    """Two ranks die in each attempt; one alone ends well. The host with notice has no part in the next one."""
    name = script('#!/bin/sh\n[ "$WORLD_SIZE" = 1 ] || kill -9 $$\necho "rank $RANK is alone"\n', "dies.sh")
    (tmp_path / name).chmod(0o755)
    launched.environment.pop("EVENSTEP_RESTART_PAUSE")
    words = ("--notice", "60", "--min-ranks", "1", "--max-restarts", "9", "--log-rank", "all", "--no-python")
    leader, follower = launched.both(*words, f"./{name}")
    leader.wait_for("the next one begins in 4 s")
    os.kill(follower.process.pid, signal.SIGTERM)
    code, text = leader.finish()
    assert code == 0 and "rank 0 is alone" in text and "is lost" not in text, text
    assert follower.finish()[0] == 0
    if "no ranks run now" not in text:
        pytest.skip("the pause was over before the signal came")
    assert re.search(r"host \S+#1 has notice: the job goes on with 1 rank without that host", text), text
    assert "restart 4 of 9" in text and "restart 5 of 9" not in text, text


def test_ctrl_c_asks_to_leave(alone: Alone, waiting: str) -> None:
    """These ranks save nothing: the second one ends it at once."""
    job = alone.run("--max-ranks", "2", "--max-restarts", "2", "--no-python", waiting, FREE="2")
    (first,) = job.wait_for(r"rank 0 of 1 attempt 0 process (\d+)")
    join = alone.join(job, "-n", "1")
    job.wait_for("has come with 1 rank")
    os.kill(int(first), signal.SIGKILL)
    job.wait_for(r"rank \d of 2 attempt 1 process", times=2)
    os.kill(join.process.pid, signal.SIGINT)
    job.wait_for(r"host \S+ leaves: the training saves its state .* goes on with 1 rank")
    os.kill(join.process.pid, signal.SIGINT)
    code, text = job.finish()
    assert code == 0 and "rank 0 of 1 attempt 2" in text, text
    join.finish()


def apart(alone: Alone, job: Job, before: str, host: str, **variables: str) -> Job:
    """`evenstep join` on a host that sees other things than this one: those that `before`, a line of a shell, makes."""
    if subprocess.run(["unshare", "-mu", "true"], capture_output=True).returncode != 0:
        go_without("namespaces", "no mount namespaces")
    over = alone.folder / f"over-{host}.sh"
    over.write_text(f'#!/bin/sh\n{before} && exec "$@"\n')
    over.chmod(0o755)
    (where,) = job.wait_for(r"hosts join at (\S+) ")
    joining = ["unshare", "-mu", str(over), alone.program, "join", "-n", "1", where]
    alone.jobs.append(Job(joining, alone.folder, alone.environment | {"EVENSTEP_HOST_ID": host} | variables))
    return alone.jobs[-1]


def test_a_host_that_joined_and_cannot_take_part_ends_nothing(alone: Alone, waiting: str) -> None:
    """There the run folder is a file. It calls itself what is no name, but an option of ssh."""
    words = ("--max-ranks", "2", "--max-restarts", "2", "--checkpoint-dir", "saved", "--no-python", waiting)
    job = alone.run(*words, FREE="2")
    (first,) = job.wait_for(r"rank 0 of 1 attempt 0 process (\d+)")
    odd = "echo -oProxyCommand=x > /proc/sys/kernel/hostname"
    join = apart(alone, job, f"{odd} && mount -t tmpfs none runs && : > runs/a", "b")
    job.wait_for("host 127.0.0.1 has come with 1 rank")
    os.kill(int(first), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and "rank 0 of 1 attempt 2" in text, text
    assert "host 127.0.0.1 is lost: " in text and "ProxyCommand" not in text
    join.finish()


def test_hosts_get_the_checkpoint_under_the_number_that_they_have_then(alone: Alone, waiting: str) -> None:
    """Two join together, and the first of them is drained: the other one is the second host then. Nobody sees another
    one's checkpoints."""
    write_checkpoint(alone.folder / "saved/step-00000007")
    words = ("--max-ranks", "3", "--max-restarts", "2", "--checkpoint-dir", "saved", "--resume", "auto", "--no-python")
    job = alone.run(*words, waiting, FREE="2")
    (rank,) = job.wait_for(r"rank 0 of 1 attempt 0 process (\d+)")
    first = apart(alone, job, "mount -t tmpfs none saved", "b")
    (name,) = job.wait_for(r"host (\S+) has come with 1 rank")
    second = apart(alone, job, "mount -t tmpfs none saved", "c", FREE="2")
    job.wait_for("has come with 1 rank", times=2)
    os.kill(int(rank), signal.SIGKILL)
    (rank,) = job.wait_for(r"rank 0 of 3 attempt 1 process (\d+)")
    job.wait_for(r"rank \d of 3 attempt 1 process", times=3)
    shutil.rmtree(alone.folder / "saved/step-00000007")
    write_checkpoint(alone.folder / "saved/step-00000008")
    drain = alone.start("drain", "--run", "a", "--no-move", name)
    job.wait_for(f"host {name} is drained")
    os.kill(int(rank), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert len(re.findall(r"rank \d of 2 attempt 2", text)) == 2 and "is lost" not in text, text
    found = re.findall(r"does not have .*saved/step-0000000(\d): it is sent there", text)
    assert found == ["7", "7", "8"], text
    assert drain.finish()[0] == 0 and first.finish()[0] == 0 and second.finish()[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-ranks", "2", "-n", "1", "t.py"], "--max-ranks lets hosts join that have the job's key"),
        (["--join-port", "7000", "t.py"], "--join-port is of several hosts"),
        (["--min-ranks", "2", "-n", "2", "t.py"], "--min-ranks is of --recovery shrink and replace, and of several"),
    ],
)
def test_options_that_make_no_sense_are_refused(alone: Alone, script: Script, words: list[str], said: str) -> None:
    script("", "t.py")
    code, text = alone.start("run", *words, EVENSTEP_JOB_KEY="").finish()
    assert code == 2 and said in text, text


def test_a_job_that_is_not_there_is_told_as_that(alone: Alone) -> None:
    with socket.socket() as deaf:  # has its port, and does not listen at it
        deaf.bind(("127.0.0.1", 0))
        code, text = alone.start("join", f"127.0.0.1:{deaf.getsockname()[1]}").finish()
    assert code == 7 and "cannot be reached: Connection refused" in text and "fix: does the job run" in text, text
    code, text = alone.start("join", "no..host:1").finish()
    assert code == 3 and "fix: `getent hosts no..host` says" in text, text
