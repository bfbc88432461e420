"""The leader of three hosts is lost: another one takes its place (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import three_hosts
from run_jobs import Job, alive, end_soon, supervised, wait_until
from test_restart_agent import TRAINING as KILLED
from test_restart_agent import expect_same_end, expect_same_processes
from three_hosts import COUNT, STANDS, TRAINING, WAITING, Hosts, cut_off, stands

Script = Callable[[str], str]

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures


def _wait(hosts: Hosts, folder: pathlib.Path, *words: str, script: str = WAITING) -> tuple[Job, list[int]]:
    """A job without Python, and its ranks' processes."""
    path = folder / "waiting.sh"
    path.write_text(script)
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--log-rank", "all", "--no-monitor", *words, "--no-python", str(path))
    ranks = [
        int(job.wait_for(rf"\[rank {rank}[^\]]*\] attempt 0 rank {rank} of 3 at \S+ process (\d+)")[0])
        for rank in range(COUNT)
    ]
    job.wait_for(STANDS)
    return job, ranks


def _ended(folder: pathlib.Path) -> bool:
    """Whether the log of each member says that nobody leads any more."""
    logs = list((folder / "runs/a/members").glob("*/*/log"))
    return len(logs) == COUNT and all(b"\xff" * 8 in log.read_bytes() for log in logs)


def _later(agent: int) -> int:
    """That agent, some turns later: what it leaves to the next one is whole then."""

    def turns() -> int:
        status = pathlib.Path(f"/proc/{agent}/status").read_text()
        return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])

    now = turns()
    wait_until(lambda: turns() > now + 20)
    return agent


def _goes_on(hosts: Hosts) -> None:
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert "this host leads now (generation 2): restart 1 of 3 from the beginning" in said, said
    assert len(re.findall(r"attempt 1 rank \d of 2 at 10.80.[12].2 ", said)) == 2, said


def test_another_host_takes_a_killed_leaders_place(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Where another agent is started on the leader's host, that one leads on; where that is killed beside the process
    that starts agents, nobody is waited for."""
    job, ranks = _wait(hosts, tmp_path)
    (tmp_path / "gpu_profiles.json").write_text("[]")  # spoilt since the job began: that ends nothing any more
    os.kill(_later(supervised(job)), signal.SIGKILL)  # not the process that has started it
    job.wait_for("the agent before was killed: ranks 0, 1 and 2 train on")
    job.wait_for(STANDS, times=2)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 4)  # longer than the killed one could have acted
    assert all(alive(rank) and not stands(rank) for rank in ranks)
    os.kill(job.process.pid, signal.SIGKILL)  # ip and env have become evenstep
    _goes_on(hosts)
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
    _, text = job.finish()
    assert "vote); --no-replace-leader turns that off\n" in text, text


@pytest.mark.more
def test_training_outlasts_agents_of_the_leader(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """Killed twice in the midst of it: the same processes come to the result of a run in which nobody was."""
    name = script(KILLED)
    whole = hosts.start(name, "whole", "0")
    code, text = whole.finish()
    assert code == 0, text
    job = hosts.start("--name", "a", "--log-rank", "all", name, "a", "2")
    for number, step in enumerate((8, 9), 1):
        agent = int(job.wait_for(rf"in step {step} agent (\d+)")[0])
        job.wait_for(STANDS, times=number)
        os.kill(_later(agent), signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert text.count("the agent before was killed: ranks 0, 1 and 2 train on\n") == 2, text
    expect_same_end(tmp_path, "a")
    expect_same_processes(tmp_path, "a", 3)
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_notice_while_nobody_leads_is_heeded_where_all_begin_anew(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """By the host that leads next: as the ranks of its attempt save nothing, they are ended when its time is over."""
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING.replace('"$TORCHELASTIC_RESTART_COUNT" = 0', "1"))
    path.chmod(0o755)
    words = ("--name", "a", "--notice", "1", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job = hosts.start(*words)
    job.wait_for(STANDS)
    for rank in range(COUNT):
        job.wait_for(rf"\[rank {rank}[^\]]*\] attempt 0 rank {rank} of 3 ")
    agents = hosts.agents_of(hosts.names[1])
    os.kill(job.process.pid, signal.SIGKILL)
    for agent in agents:
        os.kill(agent, signal.SIGTERM)
    wait_until(lambda: "the time of --notice is over" in hosts.log("a"))
    assert "SIGTERM: the training saves its state after the step under way and ends" in hosts.log("a")
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_who_takes_a_leaders_place_with_too_few_ranks_ends_and_says_so(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    job, _ = _wait(hosts, tmp_path, "--min-ranks", "3")
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: not hosts.agents())
    log = hosts.log("a")
    assert "this host leads now (generation 2): restart 1 of 3" in log, log
    assert "2 ranks are left on the hosts that can be reached, and --min-ranks is 3" in log, log
    job.finish()


@pytest.mark.more
def test_where_the_user_says_so_the_job_ends_with_its_leader(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING)
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--no-replace-leader", "--log-rank", "all", "--no-python", str(path))
    ranks = [int(job.wait_for(rf"attempt 0 rank {rank} of 3 at \S+ process (\d+)")[0]) for rank in range(COUNT)]
    os.kill(job.process.pid, signal.SIGKILL)
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
    _, text = job.finish()
    assert "takes its place" not in text and "leads now" not in hosts.log("a"), text
    assert hosts.log("a").count("the ranks here have ended, and their agent ends") == 2, hosts.log("a")


@pytest.mark.parametrize("silence", ["", *(pytest.param(one, marks=pytest.mark.more) for one in ("2", "10"))])
def test_a_leader_that_is_cut_off_waits_and_is_none_when_it_comes_back(
    hosts: Hosts, tmp_path: pathlib.Path, silence: str
) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_HOST_TIMEOUT": silence}
    job, ranks = _wait(hosts, tmp_path)
    with cut_off(hosts):
        job.wait_for("cut off from the majority of the hosts")
        wait_until(lambda: not alive(ranks[0]))
        _goes_on(hosts)
        assert job.process.poll() is None  # it waits
    code, text = job.finish()  # the host that led the job to its end has waited for it
    assert code == 7 and "the job has ended on other hosts" in text, text
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_two_of_three_agents_are_lost_at_once(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Its leader starts both again, and has a majority again: they are the members that they were."""
    job, ranks = _wait(hosts, tmp_path)
    for process in hosts.agents_of(*hosts.names[1:]):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    code, text = job.finish()
    assert code == 0, text
    assert len(re.findall(r"attempt 1 rank \d of 3", text)) == 3, text
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
    assert not list((tmp_path / "runs/a/members").glob("*/*"))


@pytest.mark.more
def test_a_leader_that_stands_still_has_no_ranks_when_another_one_begins(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Its guardian does not stand still: it holds them, and ends them where nobody lets them go."""
    job, ranks = _wait(hosts, tmp_path)
    agent = supervised(job)
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_until(lambda: stands(ranks[0]))
        assert "leads now" not in hosts.log("a")
        _goes_on(hosts)
        wait_until(lambda: not alive(ranks[0]))
    finally:
        os.kill(agent, signal.SIGCONT)
    code, text = job.finish()
    assert code == 7 and re.search("another host .* leads this job|the job has ended on other hosts", text), text
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_an_agent_that_comes_too_late_in_a_killed_leaders_place(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """The ranks there are held meanwhile, and another host leads; the next agent hears of that one, and ends them."""
    job, ranks = _wait(hosts, tmp_path)
    agent = _later(supervised(job))
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: stands(ranks[0]))
        assert "leads now" not in hosts.log("a") and all(alive(rank) for rank in ranks)
        wait_until(lambda: "this host leads now (generation 2)" in hosts.log("a"))
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    _goes_on(hosts)
    code, text = job.finish()
    assert code == 7 and "the agent before was killed: ranks" not in text, text
    assert not any(alive(rank) for rank in ranks)
    wait_until(lambda: not hosts.agents())


@contextlib.contextmanager
def _hangs(path: pathlib.Path) -> Iterator[None]:
    """A file that takes 64 KiB and then no more, until the end of this: who writes to it stands, as on a disk that hangs."""
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # before anybody writes
    try:
        yield
    finally:
        threading.Thread(target=_drain, args=(reader,), daemon=True).start()


def _drain(reader: int) -> None:
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 20):
        pass
    os.close(reader)


@pytest.mark.more
def test_a_leader_that_stands_in_a_write_is_replaced(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """To the log of its own rank; the thread of it that votes lives, and so do all connections."""
    hosts.environment = hosts.environment | {"EVENSTEP_HOST_TIMEOUT": "2"}
    fills = WAITING.replace("do sleep", 'do\n[ "$RANK" = 0 ] && [ -e fill ] && head -c 200000 /dev/zero\nsleep')
    with _hangs(tmp_path / "runs/a/logs/rank-0.log"):
        job, ranks = _wait(hosts, tmp_path, "--resume", "auto", script=fills)  # in the folder that is there
        (tmp_path / "fill").touch()
        wait_until(lambda: stands(ranks[0]))
        _goes_on(hosts)
        wait_until(lambda: not alive(ranks[0]))
        assert job.process.poll() is None
    code, text = job.finish()
    assert code == 7 and re.search("another host .* leads this job|the job has ended on other hosts", text), text
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
@pytest.mark.parametrize("stops", ["the agent", "all of its host"])
def test_a_leader_that_stood_still_for_a_moment_loses_nothing(hosts: Hosts, tmp_path: pathlib.Path, stops: str) -> None:
    """Longer than it may act, and not so long that another one leads."""
    job, ranks = _wait(hosts, tmp_path)
    stopped = [supervised(job)] if stops == "the agent" else [*hosts.agents_of(hosts.names[0]), ranks[0]]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    begun = time.monotonic()
    if stops == "the agent":
        wait_until(lambda: stands(ranks[0]))
    else:
        wait_until(lambda: time.monotonic() - begun > 5)  # longer than its lease
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    wait_until(lambda: not stands(ranks[0]))
    job.wait_for("the ranks here were held meanwhile, and go on" if stops == "the agent" else STANDS)
    os.kill(job.process.pid, signal.SIGTERM)
    code, text = job.finish()
    assert code == 143 and "restart" not in text and "cut off" not in text, text
    # of a rank that another one than its guardian stops is told
    assert stops != "the agent" or "stands still" not in text, text
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_what_was_asked_of_ranks_holds_under_another_leader(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING)
    path.chmod(0o755)
    own = ("--name", "a", "--log-rank", "1,2", "--no-monitor", "--recovery", "replace", "--spares", "1")
    job = hosts.start(*own, "--no-python", str(path))
    job.wait_for(r"attempt 0 rank [12] of 3", times=2)
    job.wait_for(STANDS)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert "2 ranks on 2 hosts" in said and "; 1 spare\n" in said, said
    assert set(re.findall(r"attempt 1 rank (\d) of 2", said)) in ({"1"}, {"1", "2"}), said  # 2 is the spare now
    wait_until(lambda: not hosts.agents())
    job.finish()


# The first rank of the third host dies in two attempts (--set-aside); the attempt without it waits.
DIES_THERE = """#!/bin/sh
echo "attempt $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE host $EVENSTEP_HOST_ID local $LOCAL_RANK"
if [ "$WORLD_SIZE" = 6 ]; then
  [ "$RANK" != 4 ] || kill -BUS $$
  while :; do sleep 0.05; done
fi
while [ "$TORCHELASTIC_RESTART_COUNT" = 2 ]; do sleep 0.05; done
"""


@pytest.mark.more
def test_a_place_that_was_set_aside_stays_so_under_another_leader(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "dies.sh"
    path.write_text(DIES_THERE)
    path.chmod(0o755)
    words = ("-n", "2", "--name", "a", "--max-restarts", "5", "--set-aside", "--log-rank", "all", "--no-monitor")
    job = hosts.start(*words, "--no-python", str(path))
    bad = hosts.names[2]
    place = job.wait_for(rf"(place 0 \(\S+\) of host {bad}) is set aside for 60 s")[0]
    job.wait_for(r"attempt 2 rank \d of 5", times=5)
    job.wait_for(STANDS)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert f"{place} stays set aside for another" in said, said
    assert len(re.findall(r"attempt 3 rank \d of 3 ", said)) == 3, said
    assert len(re.findall(rf"attempt 3 rank \d of 3 host {bad} local 0", said)) == 1, said
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_where_one_host_alone_votes_its_agent_is_started_again(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Of three one is left out; of the other two nobody could lead in the first one's place."""
    hosts.environment = hosts.environment | {"EVENSTEP_HOSTS_PATIENCE": "6"}
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING.replace("= 0 ]", "-lt 2 ]"))
    path.chmod(0o755)
    words = ("--min-ranks", "1", "--name", "a", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job = hosts.start(*words)
    job.wait_for(r"attempt 0 rank \d of 3", times=3)
    job.wait_for(STANDS)
    hosts.reach_nobody()
    os.kill(min(hosts.agents_of(hosts.names[2])), signal.SIGKILL)
    job.wait_for(rf"host {hosts.names[2]} is left out")
    job.wait_for(r"attempt 1 rank \d of 2", times=2)
    agent = _later(supervised(job))
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        os.kill(agent, signal.SIGKILL)
        hosts.reach()
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    job.wait_for("another one is started in 1 s, once its ranks are gone")
    job.wait_for(r"attempt 2 rank \d of \d", times=2)
    code, text = job.finish()
    assert code == 0 and "another host leads" not in text, text
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_what_is_left_without_a_majority_ends(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    hosts.environment = {**hosts.environment, "EVENSTEP_MAJORITY_PATIENCE": "10"}
    job, ranks = _wait(hosts, tmp_path)
    for process in (job.process.pid, *hosts.agents_of(hosts.names[1])):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: "the majority of the hosts is not heard" in hosts.log("a"))
    wait_until(lambda: not hosts.agents())
    assert "its part has ended" in hosts.log("a")
    assert end_soon(ranks)
    job.finish()


@pytest.mark.more
def test_nobody_goes_on_with_a_job_that_was_interrupted(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """SIGKILL in the time that its ranks have to end."""
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING.replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' INT\n"))
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job.wait_for(STANDS)
    os.kill(job.process.pid, signal.SIGINT)
    job.wait_for("interrupted: waiting")
    wait_until(lambda: _ended(tmp_path))
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: not hosts.agents())
    assert "leads now" not in hosts.log("a")
    job.finish()


@pytest.mark.more
def test_an_agent_that_was_started_again_is_a_candidate_too(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Of three hosts two are lost one after the other, the second of them the leader."""
    path = tmp_path / "waiting.sh"
    path.write_text(WAITING.replace("= 0 ]", "-lt 2 ]"))
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job.wait_for(r"attempt 0 rank \d of 3", times=3)
    job.wait_for(STANDS)
    os.kill(min(hosts.agents_of(hosts.names[2])), signal.SIGKILL)
    job.wait_for(r"attempt 1 rank \d of 3", times=3)
    job.wait_for(STANDS, times=2)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    assert len(re.findall(r"attempt 2 rank \d of 2 ", hosts.log("a"))) == 2, hosts.log("a")
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
@pytest.mark.parametrize("cut", [False, True])
def test_training_goes_on_from_the_checkpoint(hosts: Hosts, script: Script, tmp_path: pathlib.Path, cut: bool) -> None:
    job = hosts.start("--name", "a", "--checkpoint-every", "5", "--log-rank", "all", script(TRAINING))
    job.wait_for(r"attempt 0 rank \d of 3 begins at step 0", times=COUNT)
    job.wait_for(STANDS)
    wait_until(lambda: (tmp_path / "runs/a/checkpoints/step-00000005").exists())
    if cut:
        with cut_off(hosts):
            wait_until(lambda: "this host leads now" in hosts.log("a"))
        code, text = job.finish()
        assert code == 7 and re.search(r"another host \(10.80.[12].2\) leads this job since generation 2", text), text
    else:
        os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert "this host leads now (generation 2): restart 1 of 3 from " in said, said
    assert re.search(r"watch it at http://127.0.0.1:\d+", said)
    assert len(re.findall(r"attempt 1 rank \d of 2 begins at step 5", said)) == 2, said
    assert len(re.findall("ended after 12 steps", said)) == 2, said
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_the_majority_goes_on_without_a_host_and_takes_it_back(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """As where no leader can be lost (test_lost_hosts.py); it is a member again, and leads when the leader is killed."""
    hosts.environment = hosts.environment | {"EVENSTEP_HOSTS_PATIENCE": "6"}
    text = TRAINING.replace("attempt == 0 and es.step() >= 8", "es.step() >= 8 and not os.path.exists(f'on-{attempt}')")
    job = hosts.start("--name", "a", "--checkpoint-every", "5", "--log-rank", "all", script(text))
    job.wait_for(r"attempt 0 rank \d of 3 begins at step 0", times=COUNT)
    job.wait_for(STANDS)
    wait_until(lambda: (tmp_path / "runs/a/checkpoints/step-00000005").exists())
    with cut_off(hosts, 2):
        job.wait_for("the job goes on with 2 ranks and the same global batch, and starts that host's agent again")
        job.wait_for(r"attempt 1 rank \d of 2 begins at step 5", times=2)
    job.wait_for(f"host {hosts.names[2]} is back: .* goes on with 3 ranks")
    (tmp_path / "on-1").touch()
    job.wait_for(r"attempt 2 rank \d of 3 begins at step \d+", times=3)
    job.wait_for(STANDS, times=2)
    os.kill(job.process.pid, signal.SIGKILL)
    (tmp_path / "on-3").touch()
    wait_until(lambda: "a ended well" in hosts.log("a"))
    assert len(re.findall(r"attempt 3 rank \d of 2 begins at step", hosts.log("a"))) == 2, hosts.log("a")
    wait_until(lambda: not hosts.agents())
    job.finish()
