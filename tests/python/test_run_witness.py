"""Of two hosts with a witness the leader's, or the witness, is lost, or cut off (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import pytest
import three_hosts
from run_jobs import Job, end_soon, wait_until
from three_hosts import STANDS, WAITING, Hosts, cut_off, leads

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures


def _wait(hosts: Hosts, folder: pathlib.Path) -> tuple[Job, list[int]]:
    path = folder / "waiting.sh"
    path.write_text(WAITING)
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--log-rank", "all", "--no-monitor", "--no-python", str(path), witness=True)
    ranks = [int(one) for one in job.wait_for(r"attempt 0 rank \d of 2 at \S+ process (\d+)", times=2)]
    job.wait_for(STANDS)
    return job, ranks


@pytest.mark.more
@pytest.mark.parametrize("forgets", [False, True])
def test_of_two_hosts_with_a_witness_the_second_goes_on(hosts: Hosts, tmp_path: pathlib.Path, forgets: bool) -> None:
    job, ranks = _wait(hosts, tmp_path)
    members = tmp_path / "runs/a/members"
    if forgets:
        next(members.glob("*/3/log")).unlink()
    for process in hosts.agents_of(hosts.names[2]):  # it is started again, as the member that it was, or a new one
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    job.wait_for("its agent is started again")
    job.wait_for(STANDS, times=2)
    assert bool(list(members.glob("*/4/log"))) == forgets
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert "this host leads now (generation 2): restart 1 of 3" in said, said
    assert len(re.findall(r"attempt 1 rank 0 of 1 ", said)) == 1, said
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_a_witness_that_is_lost_when_another_host_begins_to_lead_is_started_again(
    hosts: Hosts, tmp_path: pathlib.Path
) -> None:
    job, ranks = _wait(hosts, tmp_path)
    witness = hosts.agents_of(hosts.names[2])
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: leads(hosts, hosts.names[1]))
    for process in witness:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert f"host {hosts.names[2]}: its agent is started again" in said, said
    assert "takes its place" not in said, said  # a witness leads nothing
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_of_two_hosts_the_one_that_is_cut_from_the_witness_waits(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    job, ranks = _wait(hosts, tmp_path)
    with cut_off(hosts):
        job.wait_for("cut off from the majority of the hosts")
        wait_until(lambda: "a ended well" in hosts.log("a"))
        assert job.process.poll() is None
    code, text = job.finish()
    assert code == 7 and "the job has ended on other hosts" in text, text
    assert end_soon(ranks)
    wait_until(lambda: not hosts.agents())
