"""Jobs of two hosts, which are network namespaces of this machine, that go on without a rank, or without a host. Skipped where there
are none, or UCX cannot be opened."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import generation_cases as cases
import pytest
import test_early_deaths as early
import test_run_hosts as two_hosts
from run_jobs import Job, Run, alive, wait_until
from test_generations import assert_right, bits
from test_replacement import assert_replaced
from test_run_hosts import Hosts, _ip

from evenstep import hosts as of_hosts

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
Script = Callable[[str], str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")
SHRINK = ("--recovery", "shrink", "--log-rank", "all")
REPLACE = ("--recovery", "replace", "--log-rank", "all")


@pytest.mark.parametrize(
    ("deaths", "left"),
    [
        ("3@forward:3,0@voted:8", [1, 2]),  # one there; then the first, so that who leads the others is there
        pytest.param("2@meeting:3,1@forward:3", [0, 3], marks=pytest.mark.more),
        pytest.param("0@forward:4,1@forward:4", [2, 3], marks=pytest.mark.more),  # all that are here
        pytest.param("2@commit:5,3@commit:5", [0, 1], marks=pytest.mark.more),  # all that are there
    ],
)
def test_ranks_are_killed_and_the_others_train_on(hosts: Hosts, script: Script, deaths: str, left: list[int]) -> None:
    code, text = hosts.run(*SHRINK, script(cases.PLAIN_LOOP), deaths, ranks=":2")
    assert code == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_the_output_of_a_main_rank_of_another_host_is_shown(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run("--recovery", "shrink", script(cases.PLAIN_LOOP), "0@forward:4,1@forward:4", ranks=":2")
    assert code == 0, text
    there = hosts.names[1]
    assert len(re.findall(rf"rank 2 on {there} is the main rank now, and its output is shown \(", text)) == 1, text
    assert re.findall(r"\[rank (\d) on \S+\] .*at step 18", text) == ["2"] and "[rank 3" not in text, text


@pytest.mark.parametrize(
    ("deaths", "left"),
    [("3@came:0", [0, 1, 2]), pytest.param("2@finding:0,3@finding:0", [0, 1], marks=pytest.mark.more)],
)
def test_ranks_are_killed_before_prepare_and_the_others_go_on(
    hosts: Hosts, script: Script, deaths: str, left: list[int]
) -> None:
    code, text = hosts.run(*SHRINK, script(early.PLAIN), deaths, ranks=":2")
    assert code == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_one_that_is_killed_before_its_call_may_be_waited_for(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run(*SHRINK, script(early.PLAIN), "3@own:0", ranks=":2")
    assert code == 0, text
    assert "cannot go on without rank 3: rank 3: it was in the script's own code before es.prepare" in text, text
    assert "restart 1 of 3 from the beginning" in text, text


# Ranks 2 and 3 wait in the seventh step of the first attempt until they are ended with their host.
HOST_IS_LOST = cases.PLAIN_LOOP.replace(
    '        here("applied")\n',
    """        here("applied")
        if rank in ("2", "3") and es.step() == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("waits as process", os.getpid(), "of", os.getppid(), flush=True)
            while True:
                pass
""",
)


def _lose_agent(hosts: Hosts, *words: str) -> Job:
    """A job of which the other host's agent is killed, and the ranks there with it, as where the host is lost."""
    hosts.environment = hosts.environment | {"EVENSTEP_RESTART_AGENT": "anew"}
    job = hosts.start(*words, ranks=":2")
    os.kill(_waiting(job)[0][1], signal.SIGKILL)
    return job


def _on_without_host(hosts: Hosts, text: str) -> None:
    there = hosts.names[1]
    assert f"host {there} is lost" in text
    assert f"generation 1: ranks 0 and 1 go on without host {there} (ranks 2 and 3)" in text


def _waiting(job: Job) -> list[tuple[int, int]]:
    """Ranks 2 and 3, once they wait: their processes and their agent's."""
    found = job.wait_for(r"waits as process (\d+ of \d+)", times=2)
    return [(int(process), int(agent)) for process, agent in (one.split(" of ") for one in found)]


@pytest.mark.more
def test_an_agent_is_killed_and_the_others_train_on(hosts: Hosts, script: Script) -> None:
    job = _lose_agent(hosts, *SHRINK, script(HOST_IS_LOST), "")
    code, text = job.finish()
    assert code == 0, text
    assert_right(text, [0, 1])
    _on_without_host(hosts, text)


@pytest.mark.more
def test_an_agent_is_told_to_end_and_the_others_train_on(hosts: Hosts, script: Script) -> None:
    job = hosts.start(*SHRINK, script(HOST_IS_LOST), "", ranks=":2")
    os.kill(_waiting(job)[0][1], signal.SIGTERM)
    code, text = job.finish()
    assert code == 0, text
    assert_right(text, [0, 1])
    assert f"host {hosts.names[1]}: its agent was ended by SIGTERM" in text


def test_a_host_is_cut_off_and_the_others_train_on(hosts: Hosts, script: Script) -> None:
    job = hosts.start(*SHRINK, script(HOST_IS_LOST), "", ranks=":2")
    ranks = [process for process, _ in _waiting(job)]
    _ip(f"-n {hosts.names[1]} link set eth0 down")
    try:
        code, text = job.finish()
        assert code == 0, text
        assert_right(text, [0, 1])
        _on_without_host(hosts, text)
        wait_until(lambda: not any(alive(process) for process in ranks))  # by their own agent
    finally:
        _ip(f"-n {hosts.names[1]} link set eth0 up")


@pytest.mark.more
def test_a_lost_host_is_there_again_after_a_restart(hosts: Hosts, script: Script) -> None:
    """Ranks 0 and 1 go on by themselves, and end then: all four begin anew."""
    job = _lose_agent(hosts, *SHRINK, script(HOST_IS_LOST), "0@applied:12,1@applied:12")
    code, text = job.finish()
    assert code == 0, text
    _on_without_host(hosts, text)
    assert f"host {hosts.names[1]}: its agent is started again" in text and "restart 1 of 3" in text
    assert len(re.findall(r"rank \d of 4 at step 18: \S+ apart", text)) == 4


@pytest.mark.parametrize(
    ("deaths", "waits", "began"),
    [
        ("2@forward:2,3@forward:2", "2,2", [0, 1]),  # all there: their state comes from here
        pytest.param("3@forward:2", "2", [0, 1, 2], marks=pytest.mark.more),
        pytest.param("1@forward:2,3@forward:6", "2,6", [0, 2], marks=pytest.mark.more),
        pytest.param("2@forward:2,0@applied:6", "2,6", [1, 3], marks=pytest.mark.more),
        pytest.param("0@forward:2,1@forward:2", "2,2", [2, 3], marks=pytest.mark.more),  # all here: from there
        # who gives, before, while and after it does; who gets it, before and after; one that stands
        pytest.param("2@forward:2,3@forward:2,0@giving:3", "2,2", [1], marks=pytest.mark.more),
        pytest.param("2@forward:2,3@forward:2,0@given:3", "2,2", [1], marks=pytest.mark.more),
        pytest.param("2@forward:2,3@forward:2,2@opening:0", "2", [0, 1], marks=pytest.mark.more),
        pytest.param("2@forward:2,3@forward:2,2@opened:0", "2", [0, 1], marks=pytest.mark.more),
        pytest.param("2@forward:2,3@forward:2,1@meeting:3", "2,2", [0], marks=pytest.mark.more),
        pytest.param("2@forward:2,3@forward:2,2@met:3", "2,2", [0, 1], marks=pytest.mark.more),
    ],
)
def test_processes_take_the_places_of_killed_ranks_on_their_hosts(
    hosts: Hosts, script: Script, deaths: str, waits: str, began: list[int]
) -> None:
    code, text = hosts.run(*REPLACE, script(cases.REPLACED), deaths, waits, ranks=":2")
    assert code == 0, text
    assert_replaced(text, began)


# Ranks 2 and 3 wait in the seventh step until their agent is killed; those that take their places do not.
HOST_RETURNS = cases.REPLACED.replace(
    '        here("applied")\n',
    """        here("applied")
        if rank in ("2", "3") and es.step() == 7 and not joined:
            print("waits as process", os.getpid(), "of", os.getppid(), flush=True)
            while True:
                pass
""",
)


def test_a_spare_takes_a_place_until_the_lost_host_is_back(hosts: Hosts, script: Script) -> None:
    here, there = hosts.names
    job = _lose_agent(hosts, *REPLACE, "--spares", f"{here}:1", script(HOST_RETURNS), "", "7,7")
    code, text = job.finish()
    assert code == 0, text
    assert f"generation 1: ranks 0 and 1 go on without host {there} (ranks 2 and 3)" in text
    assert "generation 2: rank 4 joins ranks 0 and 1" in text
    assert f"host {there}: its agent is started again, and the others go on meanwhile" in text
    assert f"host {there} is back: processes take the places of its 2 ranks" in text
    assert_replaced(text, [0, 1])


@pytest.mark.more
def test_a_lost_hosts_agent_is_started_again_while_the_others_go_on(hosts: Hosts, script: Script) -> None:
    job = _lose_agent(hosts, *REPLACE, script(HOST_RETURNS), "", "7,7")
    code, text = job.finish()
    assert code == 0, text
    assert f"host {hosts.names[1]} is back: processes take the places of its 2 ranks" in text
    assert_replaced(text, [0, 1])


@pytest.mark.more
@pytest.mark.parametrize(
    ("deaths", "waits", "first"),
    [
        ("2@forward:2", "2", r"generation 2: rank 5 joins ranks 0, 1 and 3"),  # that of its own host
        ("2@forward:2,3@forward:2", "2", r"ranks? (4, )?5 joins? "),  # the state comes from here to a spare there
        ("0@forward:2,1@forward:2", "2,2", r"ranks? 4(, 5)? joins? "),
    ],
)
def test_spares_of_several_hosts_take_places(hosts: Hosts, script: Script, deaths: str, waits: str, first: str) -> None:
    code, text = hosts.run(*REPLACE, "--spares", "2", script(cases.REPLACED), deaths, waits, ranks=":2")
    assert code == 0, text
    assert re.search(first, text), text
    assert_replaced(text, [rank for rank in range(4) if f"{rank}@" not in deaths])


# With a state that takes its time between the hosts; `waits`: as often as somebody may come.
LARGE = cases.REPLACED.replace(
    "es.barrier()\nmodel, optimizer",
    """print("is process", os.getpid(), flush=True)
plain_make = make


def make():
    model, *rest = plain_make()
    model.register_buffer("ballast", torch.arange(1 << 22, dtype=torch.float64))
    return (model, *rest)


es.barrier()
model, optimizer""",
    1,
)


def _travels(agents: list[int]) -> bool:
    """Whether a state is on its way to one of these agents."""
    for agent in agents:
        for entry in pathlib.Path(f"/proc/{agent}/fd").glob("*"):
            try:
                if "memfd:evenstep-parcel" in os.readlink(entry) and entry.stat().st_size > 1 << 20:
                    return True
            except OSError:
                continue
    return False


@pytest.fixture
def slow_link(hosts: Hosts) -> Iterator[None]:
    """80 Mbit/s from the first host to the second."""
    if shutil.which("tc") is None:
        pytest.skip("no tc (apt-get install iproute2)")
    words = f"netns exec {hosts.names[0]} tc qdisc add dev eth0 root tbf rate 80mbit burst 128kb latency 400ms"
    made = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no tc qdisc tbf: {made.stderr.strip()}")
    yield
    _ip(f"netns exec {hosts.names[0]} tc qdisc del dev eth0 root")


@pytest.mark.more
@pytest.mark.parametrize("lost", ["the giver", "the taker", "its agent", "the link"])
def test_what_is_lost_while_the_state_travels_costs_nobody_else(
    hosts: Hosts, script: Script, slow_link: None, lost: str
) -> None:
    job = hosts.start(*REPLACE, script(LARGE), "2@forward:2,3@forward:2", "2,2,2", ranks=":2")
    there = hosts.names[1]
    giver = int(job.wait_for(r"\[rank 0[^\]]*\] is process (\d+)")[0])
    taker = int(job.wait_for(r"rank 2: a process takes its place \(process (\d+)\)")[0])
    wait_until(lambda: _travels(hosts.agents()))
    if lost == "the link":
        _ip(f"-n {there} link set eth0 down")
        try:
            job.wait_for(f"host {there} is lost")
        finally:
            _ip(f"-n {there} link set eth0 up")
    else:
        os.kill({"the giver": giver, "the taker": taker}.get(lost) or hosts.agents()[0], signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert_replaced(text, [1] if lost == "the giver" else [0, 1])
    assert (f"host {there} is back" in text) == (lost in ("its agent", "the link")), text


@pytest.mark.more
def test_the_bits_are_those_of_a_run_in_which_no_host_was_lost(hosts: Hosts, script: Script, run: Run) -> None:
    path = script(cases.BITWISE)
    alone = run("-n", "1", "--no-pin", "--no-monitor", "--log-rank", "all", path, "", "")
    wanted = bits(alone.stdout + alone.stderr, 1)
    code, text = hosts.run(*REPLACE, path, "2@forward:2,3@forward:2", "2,2", ranks=":2")
    assert code == 0 and "restart" not in text, text
    assert "joins" in text and bits(text, 4) == wanted, text


# What is given claims to be larger than any memory.
ENDLESS = cases.REPLACED.replace(
    "waits = [",
    """plain_wrap = Gift.wrap


def wrap(*arguments):
    descriptor = plain_wrap(*arguments)
    os.ftruncate(descriptor, 1 << 44)
    return descriptor


Gift.wrap = staticmethod(wrap)
waits = [""",
    1,
)


@pytest.mark.more
def test_where_the_state_finds_no_memory_the_others_go_on(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run(*REPLACE, script(ENDLESS), "2@forward:2,3@forward:2", "2", ranks=":2")
    assert code == 0, text
    here, there = hosts.names
    assert f"host {there} does not get the state of the training that rank 0 on host {here} gives: parcel" in text
    assert re.search(r"rank [23] cannot take a lost rank's place: the state of the training did not come", text), text
    assert len(re.findall(r"rank [01] of 2 at step 18: \S+ apart, rate kept", text)) == 2, text


@pytest.mark.more
@pytest.mark.parametrize(
    ("stops", "ranks", "left"),
    [
        ("3~forward:3", ":2", [0, 1, 2]),  # its host's other rank says how it is
        ("2~commit:3,0~in:5", ":2", [1, 3]),
        ("1~forward:3", "", [0]),  # nobody there can: it does not answer
        ("3^forward:3,1^vote:5", ":2", [0, 1, 2, 3]),
    ],
)
def test_a_stopped_rank_alone_is_lost(hosts: Hosts, script: Script, stops: str, ranks: str, left: list[int]) -> None:
    hosts.environment["EVENSTEP_STOP_PATIENCE"] = "120" if "^" in stops else "1"
    code, text = hosts.run(*SHRINK, script(cases.HELD_UP), stops, ranks=ranks)
    assert code == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_a_rank_that_hangs_there_alone_is_lost(hosts: Hosts, script: Script) -> None:
    hangs = ("--hang-timeout", "2", "--on-hang", "restart")
    code, text = hosts.run(*SHRINK, *hangs, script(cases.HELD_UP), "3!in:5", ranks=":2")
    assert code == 0, text
    assert "generation 1: ranks 0, 1 and 2 go on without rank 3" in text, text
    assert "hung, and was ended for it: no progress" in text and "restart 1" not in text, text
