"""The leader of three hosts is killed while their ranks compute, with --recovery: those of the others keep their processes and
go on under another leader (network namespaces of this machine; root, ip and UCX)."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from collections.abc import Callable

import generation_cases as cases
import pytest
import three_hosts
from run_jobs import Job, wait_until
from test_generations import assert_right
from test_recovery_hosts import HOST_RETURNS
from test_replacement import assert_replaced
from test_standing_hosts import GRACE
from three_hosts import STANDS, Hosts, cut_off, leads, stands

from evenstep import hosts as of_hosts

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures
Script = Callable[[str], str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")
SHRINK = ("--name", "a", "--recovery", "shrink", "--log-rank", "all")

# The rank that is named ends the agent of its host where the test says: RANK@POINT:STEP; the first step waits until all can vote.
KILLS_AGENT = (
    cases.PLAIN_LOOP.replace(
        "        os.kill(os.getpid(), 9)\n", "        os.kill(os.getppid(), 9)\n        time.sleep(600)\n"
    )
    .replace(
        "passes = 0\n",
        """passes = 0
while not os.path.exists("go"):
    time.sleep(0.02)
""",
    )
    .replace("import copy, os, sys", "import copy, os, sys, time")
)


# Says its place, and waits until its attempt is to end: by a failure, but for the last one.
LONG = """#!/bin/sh
echo "attempt $TORCHELASTIC_RESTART_COUNT rank $RANK of $WORLD_SIZE process $$"
while [ ! -e "end-$TORCHELASTIC_RESTART_COUNT" ]; do sleep 0.05; done
[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && kill -9 $$
exit 0
"""


def _said(folder: pathlib.Path) -> str:
    """What the ranks printed, on any host."""
    return "".join(path.read_text() for path in sorted((folder / "runs/a/logs").glob("rank-*.log")))


def _ends(hosts: Hosts) -> str:
    wait_until(lambda: "a ended well" in hosts.log("a"))
    log = hosts.log("a")
    assert "this host leads now (generation 2): ranks that live keep their processes" in log, log
    assert "restart" not in log, log
    return log


def _begun(hosts: Hosts, folder: pathlib.Path, *words: str) -> Job:
    job = hosts.start(*words)
    job.wait_for(STANDS)
    (folder / "go").touch()
    return job


@pytest.mark.parametrize(
    "point",
    [
        "forward:4",
        pytest.param("voted:5", marks=pytest.mark.more),
        pytest.param("commit:6", marks=pytest.mark.more),
        pytest.param("committed:7", marks=pytest.mark.more),
        pytest.param("applied:3", marks=pytest.mark.more),
    ],
)
def test_ranks_outlast_their_leader(hosts: Hosts, script: Script, tmp_path: pathlib.Path, point: str) -> None:
    job = _begun(hosts, tmp_path, *SHRINK, script(KILLS_AGENT), f"0@{point}")
    log, said = _ends(hosts), _said(tmp_path)
    assert_right(said, [1, 2])
    assert re.search("generation 1: ranks 1 and 2 go on without host", log), log
    assert said.count("==== attempt") == 3  # nobody was started again
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_notice_while_nobody_leads_is_heeded_by_the_next_leader(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """The first host's rank kills its leader, and then gives notice to the second one's agent."""
    both = """f"env -i setsid sh -c 'kill -9 {os.getppid()}; kill {open('agent').read()}' &" """
    text = KILLS_AGENT.replace("os.kill(os.getppid(), 9)", f"os.system({both})").replace(
        "passes = 0\n", 'if os.environ["RANK"] == "1":\n    open("agent", "w").write(str(os.getppid()))\npasses = 0\n'
    )
    text = text.replace("    passes += 1\n", "    passes += 1\n    time.sleep(0.5)\n")
    assert "sleep(0.5)" in text
    words = ("--notice", "60", "--checkpoint-dir", "saved")
    job = _begun(hosts, tmp_path, *SHRINK, *words, script(text), "0@forward:4")
    wait_until(lambda: "the training is saved" in hosts.log("a"))
    log = hosts.log("a")
    assert "this host leads now (generation 2): ranks that live keep their processes" in log, log
    assert "SIGTERM: the training saves its state" in log and "restart" not in log, log
    assert _said(tmp_path).count("==== attempt") == 3  # nobody was started again
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_a_stopped_rank_is_heard_of_under_the_next_leader(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """Of the two that are left, each alone on its host, one is stopped later."""
    hosts.environment = hosts.environment | GRACE
    stops = "        if rank == '2' and es.step() == 9:\n            os.kill(os.getpid(), 19)\n"
    text = KILLS_AGENT.replace('        here("applied")\n', f'        here("applied")\n{stops}')
    job = _begun(hosts, tmp_path, *SHRINK, script(text), "0@forward:4")
    log, said = _ends(hosts), _said(tmp_path)
    assert_right(said, [1])
    assert re.search("generation 1: ranks 1 and 2 go on without host", log), log
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_to_the_last_bit(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """Of a training in blocks, the parameters are those of one in which nobody died."""
    text = cases.BITWISE.replace("os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 9); time.sleep(600)")
    text = text.replace("losses = []\n", "losses = []\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\n")
    job = _begun(hosts, tmp_path, *SHRINK, script(text), "0@forward:7", "")
    _ends(hosts)
    job.finish()
    bits = re.findall(r"bits (\w+)", _said(tmp_path))
    plain = hosts.start("--name", "b", "--recovery", "shrink", "--log-rank", "all", script(text), "", "")
    code, said = plain.finish()
    assert code == 0, said
    assert len(bits) == 2 and set(bits) == set(re.findall(r"bits (\w+)", said)), said


@pytest.mark.more
def test_a_process_takes_a_lost_ranks_place_under_the_next_leader(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """And the lost leader's host is started again, whose ranks get the state of training from another one."""
    text = cases.REPLACED.replace(
        "os.kill(os.getpid(), 9)", "os.kill(os.getppid() if rank == '0' else os.getpid(), 9); time.sleep(600)"
    )
    text = text.replace("passes, first =", "while not os.path.exists('go'):\n    time.sleep(0.02)\npasses, first =")
    words = ("--name", "a", "--recovery", "replace", "-n", "2", "--log-rank", "all", script(text))
    job = _begun(hosts, tmp_path, *words, "0@forward:3,4@forward:6", "6,7,8,9")
    log = _ends(hosts)
    assert f"host {hosts.names[0]} is back: processes take the places of its 2 ranks" in log, log
    job.finish()
    notices = [line for line in hosts.log("a").splitlines() if line.startswith("evenstep:")]
    assert_replaced(_said(tmp_path) + "\n".join(notices), [2, 3, 5])


@pytest.mark.more
def test_a_spare_of_another_host_takes_the_lost_leaders_place(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """Spares outlast the leader, too, and get the state of training under the next one."""
    text = cases.REPLACED.replace("os.kill(os.getpid(), 9)", "os.kill(os.getppid(), 9); time.sleep(600)")
    text = text.replace("passes, first =", "while not os.path.exists('go'):\n    time.sleep(0.02)\npasses, first =")
    waiting = hosts.names[2]
    words = ("--name", "a", "--recovery", "replace", "--spares", f"{waiting}:1", "--max-restarts", "0")
    job = hosts.start(*words, "--log-rank", "all", script(text), "0@forward:3", "6")
    job.wait_for(STANDS)
    hosts.reach_nobody()
    (tmp_path / "go").touch()
    log = _ends(hosts)
    job.finish()
    notices = "".join(f"{line}\n" for line in log.splitlines() if line.startswith("evenstep:"))
    assert_replaced(_said(tmp_path) + notices, [1, 2])
    assert "generation 2: rank 3 joins ranks 1 and 2" in log, log


@pytest.mark.more
@pytest.mark.parametrize("silence", ["", "2", "12"])
def test_a_leader_that_is_cut_off_goes_on_with_nobody(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, silence: str
) -> None:
    """It notices that the others are lost, and may not leave them out; they leave it out. Ranks wait for as long as that takes."""
    hosts.environment = hosts.environment | {"EVENSTEP_HOST_TIMEOUT": silence}
    text = KILLS_AGENT.replace("os.kill(os.getppid(), 9)", "open('cut', 'w').close()")
    job = _begun(hosts, tmp_path, *SHRINK, script(text), "0@forward:4")
    wait_until(lambda: (tmp_path / "cut").exists())
    with cut_off(hosts):
        log = _ends(hosts)
        assert re.search("generation 1: ranks 1 and 2 go on without host", log), log
        assert_right(_said(tmp_path), [1, 2])
    code, said = job.finish()
    assert code == 7 and "cut off from the majority of the hosts" in said, said
    assert "go on without" not in said and "goes on without" not in said, said


@pytest.mark.more
def test_a_leader_that_stands_still_for_a_moment_holds_its_ranks(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """The others wait for them meanwhile, and nobody is lost."""
    text = cases.PLAIN_LOOP.replace(
        "        os.kill(os.getpid(), 9)\n",
        "        open('at', 'w').write(str(os.getpid()))\n"
        "        while not os.path.exists('again'):\n            time.sleep(0.01)\n",
    ).replace("import copy, os, sys", "import copy, os, sys, time")
    job = hosts.start(*SHRINK, script(text), "0@forward:4")
    job.wait_for(STANDS)
    wait_until(lambda: (tmp_path / "at").exists() and (tmp_path / "at").read_text())
    rank = int((tmp_path / "at").read_text())
    os.kill(job.process.pid, signal.SIGSTOP)
    wait_until(lambda: stands(rank))
    os.kill(job.process.pid, signal.SIGCONT)
    wait_until(lambda: not stands(rank))
    (tmp_path / "again").touch()
    code, said = job.finish()
    assert code == 0 and "the ranks here were held meanwhile, and go on" in said, said
    assert "without" not in said and "stands still" not in said and "restart" not in said, said
    assert_right(_said(tmp_path), [0, 1, 2])


@pytest.mark.more
def test_a_lost_host_that_comes_back_votes_again(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    third = hosts.names[2]
    words = ("--name", "a", "--recovery", "replace", "--log-rank", "all")
    text = HOST_RETURNS + "while not os.path.exists('end'):\n    time.sleep(0.02)\n"
    job = hosts.start(*words, script(text), "", "7")
    job.wait_for(STANDS)
    (agent,) = job.wait_for(r"waits as process \d+ of (\d+)")
    os.kill(int(agent), signal.SIGKILL)
    job.wait_for(f"host {third} is back: processes take the places of its 1 rank")
    job.wait_for(STANDS, times=2)
    (tmp_path / "end").touch()
    code, said = job.finish()
    assert code == 0 and f"generation 1: ranks 0 and 1 go on without host {third} (rank 2)" in said, said
    assert_replaced(said, [0, 1])
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_one_that_cannot_go_on_begins_anew(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """Two ranks are too few: the next leader ends them, and the job starts again, without the lost host."""
    words = ("--name", "a", "--recovery", "shrink", "--min-ranks", "2", "--log-rank", "all")
    text = KILLS_AGENT.replace("os.kill(os.getppid(), 9)", "os.kill(os.getppid() if rank == '0' else os.getpid(), 9)")
    job = _begun(hosts, tmp_path, *words, script(text), "1@voted:3,0@forward:4")
    wait_until(lambda: "a ended well" in hosts.log("a"))
    assert "this host leads now (generation 2): restart 1 of 3 from" in hosts.log("a")
    job.finish()


# The script of test_elastic's jobs: each rank waits at step 8 until a file says that it may go on.
@pytest.mark.more
def test_a_host_joins_under_the_next_leader_and_one_of_them_leads_then(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_JOB_KEY": "ab" * 32}
    path = tmp_path / "waiting.sh"
    path.write_text(LONG)
    path.chmod(0o755)
    words = ("--name", "a", "--max-ranks", "3", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job = hosts.start(*words)
    job.wait_for(STANDS)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: re.search(r"hosts join at (\S+) ", hosts.log("a")))
    wait_until(lambda: re.search(r"attempt 1 rank 1 of 2", hosts.log("a")))
    second = next(name for name in hosts.names[1:] if leads(hosts, name))
    found = re.search(r"hosts join at \S+:(\d+) ", hosts.log("a"))
    assert found
    first = hosts.names[0]
    where = f"10.80.{hosts.names.index(second)}.2:{found[1]}"
    command = ["ip", "netns", "exec", first, "env", f"EVENSTEP_HOST_ID={first}"]
    hosts.jobs.append(Job([*command, str(hosts.program), "join", "-n", "1", where], hosts.folder, hosts.environment))
    wait_until(lambda: "has come with 1 rank" in hosts.log("a"))
    (tmp_path / "end-1").touch()  # a script that is never asked to save: the job restarts, with the newcomer
    wait_until(lambda: len(re.findall(STANDS, hosts.log("a"))) == 1)
    for process in hosts.agents_of(second):
        os.kill(process, signal.SIGKILL)
    (tmp_path / "end-3").touch()
    wait_until(lambda: "a ended well" in hosts.log("a"))
    assert "this host leads now (generation 3)" in hosts.log("a")
    wait_until(lambda: not hosts.agents())
    job.finish()
