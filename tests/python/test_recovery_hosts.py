"""Jobs of two hosts, which are network namespaces of this machine, that go on without a rank, or without a host. Skipped where there
are none, or UCX cannot be opened."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import generation_cases as cases
import pytest
import test_run_hosts as two_hosts
from run_jobs import Job, alive, wait_until
from test_generations import assert_right
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


def _on_without_host(hosts: Hosts, text: str) -> None:
    there = hosts.names[1]
    assert f"host {there} is lost" in text
    assert f"generation 1: ranks 0 and 1 go on without host {there} (ranks 2 and 3)" in text


def _waiting(job: Job) -> list[tuple[int, int]]:
    """Ranks 2 and 3, once they wait: their processes and their agent's."""
    found = job.wait_for(r"waits as process (\d+ of \d+)", times=2)
    return [(int(process), int(agent)) for process, agent in (one.split(" of ") for one in found)]


def test_an_agent_is_killed_and_the_others_train_on(hosts: Hosts, script: Script) -> None:
    job = hosts.start(*SHRINK, script(HOST_IS_LOST), "", ranks=":2")
    os.kill(_waiting(job)[0][1], signal.SIGKILL)
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


@pytest.mark.more
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
    job = hosts.start(*SHRINK, script(HOST_IS_LOST), "0@applied:12,1@applied:12", ranks=":2")
    os.kill(_waiting(job)[0][1], signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    _on_without_host(hosts, text)
    assert f"host {hosts.names[1]}: its agent is started again" in text and "restart 1 of 3" in text
    assert len(re.findall(r"rank \d of 4 at step 18: \S+ apart", text)) == 4


@pytest.mark.parametrize(
    ("deaths", "waits", "began"),
    [
        ("3@forward:2", "2", [0, 1, 2]),
        pytest.param("1@forward:2,3@forward:6", "2,6", [0, 2], marks=pytest.mark.more),
        pytest.param("2@forward:2,0@applied:6", "2,6", [1, 3], marks=pytest.mark.more),
    ],
)
def test_processes_take_the_places_of_killed_ranks_on_their_hosts(
    hosts: Hosts, script: Script, deaths: str, waits: str, began: list[int]
) -> None:
    code, text = hosts.run(*REPLACE, script(cases.REPLACED), deaths, waits, ranks=":2")
    assert code == 0, text
    assert_replaced(text, began)


@pytest.mark.more
def test_nobody_takes_a_place_where_nobody_is_left(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run(*REPLACE, script(cases.PLAIN_LOOP), "1@forward:3")
    assert code == 0, text
    assert_right(text, [0])
    assert f"rank 1: no process takes its place: nobody is left on host {hosts.names[1]}" in text
