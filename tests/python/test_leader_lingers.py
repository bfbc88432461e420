"""A leader that took another one's place has ended its job while a host is cut off: it stays so that this host hears of the end,
and no longer once nobody there can hear it (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import test_run_succession as three_hosts
from run_jobs import wait_until
from test_run_hosts import _ip
from test_run_succession import STANDS, Hosts, _leads

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures

# Waits, but for the one that is alone in the end.
NOT_ALONE = """#!/bin/sh
echo "rank $RANK of $WORLD_SIZE"
while [ "$WORLD_SIZE" != 1 ]; do sleep 0.05; done
"""


@contextlib.contextmanager
def _cut_off(hosts: Hosts, number: int) -> Iterator[None]:
    """This host's cable is out meanwhile."""
    name = hosts.names[number]
    _ip(f"-n {name} link set eth0 down")
    try:
        yield
    finally:
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} route replace 10.80.0.0/16 via 10.80.{number}.1")


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
    other = next(number for number in (1, 2) if not _leads(hosts, hosts.names[number]))
    hosts.reach_nobody()
    with _cut_off(hosts, other):
        wait_until(lambda: "a ended well" in hosts.log("a"))
        for process in hosts.agents_of(hosts.names[other]):  # nobody hears of it, and there is nobody who could
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    wait_until(lambda: not hosts.agents())  # the patience is 300 s
    assert f"host {hosts.names[other]} is lost" in hosts.log("a"), hosts.log("a")
    job.finish()
