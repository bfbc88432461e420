"""A rank is stopped that is alone on its host, so that no other rank sees it: its agent tells the others. Or it hangs where others
wait for it: their agent tells its own (network namespaces of this machine; root, ip and UCX)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import generation_cases as cases
import pytest
import test_run_hosts as two_hosts
from test_generations import assert_right
from test_hangs import MEET
from test_run_hosts import Hosts

from evenstep import hosts as of_hosts

names, hosts = two_hosts.names, two_hosts.hosts  # fixtures
Script = Callable[[str], str]
UCX, WHY_NONE = of_hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")
pytestmark = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")
SHRINK = ("--recovery", "shrink", "--log-rank", "all")
# By its silence alone it would be given up after 60 times the grace, which is longer than any of these tests waits; and in other words.
GRACE = {"EVENSTEP_STOP_GRACE": "3"}
NAMED = r"rank \d \(process \d+ on host \S+\) was stopped \(SIGSTOP, SIGTSTP\) and stands still"

# Rank 1 stands still in the middle of things; the other says what its call ends with.
IN_A_CALL = """
    import os, signal, time
    import numpy as np
    import evenstep as es

    group = es.comm.open()
    values = np.ones(250_000, dtype=np.float32)
    for _ in range(5):
        group.all_reduce(values, "max")
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        print("goes on", flush=True)
    try:
        while True:
            group.all_reduce(values, "max")
    except es.EvenstepError as error:
        print("heard:", error.status, error, flush=True)
        raise SystemExit(3)
"""


def test_the_others_hear_of_it(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | GRACE
    code, text = hosts.run("--max-restarts", "0", "--log-rank", "all", script(IN_A_CALL))
    assert code != 0 and "goes on" not in text, text
    assert re.search(f"heard: EVEN_ERR_PEER_LOST {NAMED}", text), text


# The agent of rank 1 stands still for longer than a host may be silent, in which the other host goes on.
AGENT_STOPS = """
    import os, signal, time
    import numpy as np
    import evenstep as es

    group = es.comm.open()
    values = np.ones(10, dtype=np.float32)
    group.all_reduce(values, "max")
    if group.rank == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(6)
        os.kill(os.getppid(), signal.SIGCONT)
        time.sleep(1.5)  # in which it looks at what has come
    group.all_reduce(values, "max")
    print("went on", flush=True)
"""


def test_an_agent_that_stood_still_keeps_its_links(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run("--max-restarts", "0", "--log-rank", "all", script(AGENT_STOPS))
    assert code == 0 and text.count("went on") == 2, text


def test_one_that_never_comes_to_init_process_group_is_told_by_its_agent(hosts: Hosts, script: Script) -> None:
    words = ("--hang-timeout", "0.5", "--on-hang", "restart", "--max-restarts", "1", "--log-rank", "all")
    code, text = hosts.run(*words, script(MEET))
    assert code == 0 and text.count("has met the others") == 2, text
    assert re.search(r"rank 1 \(cpu\S*, process \d+\) hangs: no progress for \S+ s in start", text), text
    assert "; 1 rank waits for it in init_process_group" in text and "in hang_in_a_lock" in text, text


@pytest.mark.parametrize(
    ("stops", "left"),
    [
        ("1~forward:3", [0]),
        pytest.param("0~voted:5", [1], marks=pytest.mark.more),  # with the leader's agent
        pytest.param("1~commit:4", [0], marks=pytest.mark.more),
    ],
)
def test_the_others_train_on(hosts: Hosts, script: Script, stops: str, left: list[int]) -> None:
    hosts.environment = hosts.environment | GRACE
    code, text = hosts.run(*SHRINK, script(cases.HELD_UP), stops)
    assert code == 0, text
    assert_right(text, left)


@pytest.mark.more
def test_who_goes_on_in_time_is_not_lost(hosts: Hosts, script: Script) -> None:
    """After the grace, within the patience: its step is made again by all."""
    hosts.environment = hosts.environment | GRACE | {"EVENSTEP_STOP_PATIENCE": "120"}
    code, text = hosts.run(*SHRINK, script(cases.HELD_UP), "1^forward:3")
    assert code == 0, text
    assert_right(text, [0, 1])
    assert "the stopped rank goes on, and the step under way is made again by all" in text, text


# Rank 1 is let go on once its agent has seen that it stands.
GOES_ON = IN_A_CALL.replace(
    "        os.kill(os.getpid(), signal.SIGSTOP)\n",
    """        again = f"until grep -q stopped /proc/{os.getpid()}/status; do :; done; sleep 0.3; kill -CONT {os.getpid()}"
        os.posix_spawn("/bin/sh", ["sh", "-c", again], os.environ)
        os.kill(os.getpid(), signal.SIGSTOP)
""",
).replace("while True:", "for _ in range(50):")


@pytest.mark.more
def test_nobody_hears_of_it_within_the_grace(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_STOP_GRACE": "600"}
    code, text = hosts.run("--max-restarts", "0", "--log-rank", "all", script(GOES_ON))
    assert code == 0 and "goes on" in text and "heard" not in text, text


BEFORE_ITS_GROUP = """
    import os, signal
    import torch.distributed as dist
    import evenstep as es

    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.init_process_group("gloo")
    dist.barrier()
    print("met", flush=True)
"""


@pytest.mark.more
def test_before_a_group_of_the_scripts_own_it_is_ended(hosts: Hosts, script: Script) -> None:
    code, text = hosts.run("--log-rank", "all", script(BEFORE_ITS_GROUP))
    assert code == 0, text
    assert "rank 1 still stands, and the others wait for all ranks to come together: it is ended" in text, text
    assert text.count("restart 1 of 3 from the beginning") == 1 and len(re.findall(r"\] met$", text, re.M)) == 2, text
