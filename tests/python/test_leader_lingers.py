"""A leader that took another one's place has ended its job while a host is cut off: it stays so that this host hears of the end,
and no longer once nobody there can hear it (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal

import three_hosts
from run_jobs import wait_until
from three_hosts import STANDS, Hosts, cut_off, leads

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures

# Waits, but for the one that is alone in the end.
NOT_ALONE = """#!/bin/sh
echo "rank $RANK of $WORLD_SIZE"
while [ "$WORLD_SIZE" != 1 ]; do sleep 0.05; done
"""


def test_a_leader_that_has_ended_does_not_stay_for_an_agent_that_has_ended(
    hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "waiting.sh"
    path.write_text(NOT_ALONE)
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--min-ranks", "1", "--log-rank", "all", "--no-monitor", "--no-python", str(path))
    job.wait_for(r"rank \d of 3", times=3)
    job.wait_for(STANDS)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: hosts.log("a").count(" of 2\n") == 2)
    other = next(number for number in (1, 2) if not leads(hosts, hosts.names[number]))
    hosts.reach_nobody()
    with cut_off(hosts, other):
        wait_until(lambda: "a ended well" in hosts.log("a"))
        for process in hosts.agents_of(hosts.names[other]):  # nobody hears of it, and there is nobody who could
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    wait_until(lambda: not hosts.agents())  # the patience is 300 s
    assert f"host {hosts.names[other]} is lost" in hosts.log("a"), hosts.log("a")
    job.finish()
