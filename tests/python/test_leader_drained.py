"""Jobs whose leader can be replaced, and whose hosts change: the host that leads is drained, another one leads first; hosts are left
out, drained, or given up as lost (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
from collections.abc import Callable

import pytest
import three_hosts
from run_jobs import Job, Run, wait_until
from test_drain_hosts import TRAINING, near
from three_hosts import STANDS, WAITING, Hosts

names, hosts = three_hosts.names, three_hosts.hosts  # fixtures
Script = Callable[..., str]


def _drain(hosts: Hosts, *words: str) -> Job:
    command = ["ip", "netns", "exec", hosts.names[0], str(hosts.program), "drain", "--run", "a", *words]
    hosts.jobs.append(Job(command, hosts.folder, hosts.environment))
    return hosts.jobs[-1]


def _agent_of(rank: int) -> int:
    return int(pathlib.Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


def _waiting(hosts: Hosts, folder: pathlib.Path, *words: str) -> tuple[Job, list[int]]:
    """A job without Python, and its ranks' agents, whose guardians end their ranks where they are killed."""
    path = folder / "waiting.sh"
    path.write_text(WAITING)
    path.chmod(0o755)
    job = hosts.start("--name", "a", "--log-rank", "all", "--no-monitor", *words, "--no-python", str(path))
    agents = [_agent_of(int(job.wait_for(rf"attempt 0 rank {rank} of 3 at \S+ process (\d+)")[0])) for rank in range(3)]
    job.wait_for(STANDS)
    return job, agents


@pytest.mark.more
@pytest.mark.parametrize("moves", [False, True])
def test_another_host_leads_before_the_leaders_host_is_drained(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, moves: bool
) -> None:
    """No restart is used up, and the result is that of one rank."""
    first, _, third = hosts.names
    job = hosts.start("--name", "a", "--max-restarts", "0", "--log-rank", "all", script(TRAINING))
    job.wait_for("at step 6", times=3)
    job.wait_for(STANDS)
    drain = _drain(hosts, "--to", f"{third}:1", first) if moves else _drain(hosts, "--no-move", first)
    ranks = 3 if moves else 2
    job.wait_for(
        f"host {first}, which leads the job, is drained: .* and goes on with {ranks} ranks where another host leads"
    )
    (tmp_path / "told").touch()
    code, text = drain.finish()
    assert code == 0 and re.search(
        rf"host {first} is out of the job, which another host \(10.80.[12].2\) leads since generation 2", text
    ), text
    code, text = job.finish()
    assert code == 7 and f"host {first} is out of the job, which another host" in text, text
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert re.search(
        rf"generation 2\), for host {first} is drained: the job goes on from \S+/step-0000000[67]\n", said
    ), said
    assert f"{ranks} ranks on 2 hosts" in said and (not moves or f"{third} 2" in said), said
    ended = re.findall(r"steps ([78]) to 18 process \d+ sum (\S+)", said)
    assert len(ended) == ranks and "Traceback" not in said and "restart" not in said, said
    hosts.jobs.append(
        Job(
            [str(hosts.program), "run", "-n", "1", "--no-pin", "--no-monitor", "--name", "alone", script(TRAINING)],
            hosts.folder,
            hosts.environment,
        )
    )
    code, text = hosts.jobs[-1].finish()
    alone = re.findall(r"sum (\S+)", text)[0]
    assert all(near(total, alone) for _, total in ended), (alone, said)
    wait_until(lambda: not hosts.agents())


@pytest.mark.more
def test_a_host_is_drained_while_the_leader_can_be_replaced(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    third = hosts.names[2]
    job = hosts.start("--name", "a", "--max-restarts", "0", "--log-rank", "all", script(TRAINING))
    job.wait_for("at step 6", times=3)
    job.wait_for(STANDS)
    drain = _drain(hosts, "--no-move", "--cold", third)
    job.wait_for(f"host {third} is drained")
    (tmp_path / "told").touch()
    code, text = drain.finish()
    assert code == 0 and f"host {third} is out of the job" in text, text
    wait_until(lambda: not hosts.agents_of(third))
    code, text = job.finish()
    assert code == 0 and len(re.findall(r"steps [78] to 18", text)) == 2 and "leads now" not in hosts.log("a"), text
    wait_until(lambda: not hosts.agents())


# Holds in the first three attempts, each at a later step.
HOLDS = TRAINING.replace('attempt == "0" and es.step() == 6', 'attempt in "012" and es.step() == 6 + 3 * int(attempt)')
HOLDS = HOLDS.replace('print("at step 6"', 'print("holds in", attempt').replace('"told"', 'f"told-{attempt}"')


@pytest.mark.more
def test_hosts_change_beside_a_witness(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """One is drained, and joins again: with it and the witness another one leads where the first is lost."""
    assert "3 * int" in HOLDS and "holds in" in HOLDS and "told-{attempt}" in HOLDS
    first, second, witness = hosts.names
    hosts.environment = hosts.environment | {"EVENSTEP_JOB_KEY": "ab" * 32}
    words = ("--max-restarts", "1", "--max-ranks", "2", "--min-ranks", "1", "--log-rank", "all")
    job = hosts.start("--name", "a", *words, script(HOLDS), witness=True)
    (port,) = job.wait_for(r"hosts join at \S+:(\d+) ")
    job.wait_for("holds in 0", times=2)
    job.wait_for(r"takes its place \(3 of 3 vote\)")
    code, text = _drain(hosts, witness).finish()
    assert code == 8 and f"host {witness} only votes (--witness)" in text, text
    drain = _drain(hosts, "--no-move", "--cold", second)
    job.wait_for(f"host {second} is drained")
    (tmp_path / "told-0").touch()
    code, text = drain.finish()
    assert code == 0 and f"host {second} is out of the job" in text, text
    wait_until(lambda: not hosts.agents_of(second))
    job.wait_for("holds in 1")
    code, text = _drain(hosts, first).finish()
    assert code == 9 and "no other host can take its place any more: too few are left" in text, text
    command = ["ip", "netns", "exec", second, "env", f"EVENSTEP_HOST_ID={second}", str(hosts.program)]
    hosts.jobs.append(Job([*command, "join", "-n", "1", f"10.80.0.2:{port}"], hosts.folder, hosts.environment))
    job.wait_for("has come with 1 rank")
    (tmp_path / "told-1").touch()
    job.wait_for("holds in 2", times=2)
    job.wait_for(r"takes its place \(3 of 3 vote\)", times=2)
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: "a ended well" in hosts.log("a"))
    said = hosts.log("a")
    assert "this host leads now (generation 2): restart 1 of 1" in said, said
    assert len(re.findall(r"steps 1[01] to 18 process", said)) == 1 and "Traceback" not in said, said
    wait_until(lambda: not hosts.agents())
    job.finish()


@pytest.mark.more
def test_a_host_that_cannot_be_started_again_is_left_out(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """Two are left, of which the leader alone votes."""
    third = hosts.names[2]
    job, agents = _waiting(hosts, tmp_path, "--min-ranks", "2")
    _forbid(hosts, third)
    os.kill(agents[2], signal.SIGKILL)
    job.wait_for(f"host {third} is left out")
    job.wait_for(r"attempt 1 rank \d of 2", times=2)
    code, text = job.finish()
    assert code == 0 and "cut off" not in text, text
    wait_until(lambda: not hosts.agents())


def _forbid(hosts: Hosts, *names: str) -> None:
    """Nobody reaches them any more."""
    shell = hosts.folder / "shell.sh"
    text = shell.read_text()
    (hosts.folder / "next.sh").write_text(
        text.replace("name=$1\n", f'name=$1\ncase " {" ".join(names)} " in *" $1 "*) exit 255;; esac\n')
    )
    (hosts.folder / "next.sh").chmod(0o755)
    (hosts.folder / "next.sh").rename(shell)


@pytest.mark.more
def test_most_hosts_are_lost_at_once_for_good_and_the_user_says_so(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    first, second, third = hosts.names
    job, agents = _waiting(hosts, tmp_path)
    code, text = _drain(hosts, "--lost").finish()
    assert code == 9 and "this job waits for no host that is lost" in text, text
    _forbid(hosts, second, third)
    os.kill(agents[1], signal.SIGKILL)
    os.kill(agents[2], signal.SIGKILL)
    job.wait_for(f"this host waits for {second}, {third} .*`evenstep drain --lost` gives them up")
    code, text = _drain(hosts, "--lost").finish()
    assert code == 0 and f"the job goes on without {second}, {third}" in text, text
    code, text = job.finish()
    assert code == 0 and "attempt 1 rank 0 of 1" in text and f"1 rank on 1 host: {first} 1" in text, text
    wait_until(lambda: not hosts.agents())


# The last rank stays when the training is saved, until its host is lost.
STAYS = TRAINING.replace(
    "    together = train(es.prepare, es.epochs(3))\n",
    """    try:
        together = train(es.prepare, es.epochs(3))
    except SystemExit:
        if attempt == "0" and os.environ["RANK"] == "2":
            print("saved, and stays", flush=True)
            while True:
                time.sleep(0.05)
        raise
""",
)


@pytest.mark.more
def test_a_host_is_lost_while_the_leaders_host_is_drained(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, run: Run
) -> None:
    """Of three, one alone would have no majority of them: the command says so, and the job goes on here, the lost host with
    it, from exactly where the training was saved."""
    assert STAYS != TRAINING
    first, _, third = hosts.names
    job = hosts.start("--name", "a", "--max-restarts", "1", "--log-rank", "all", script(STAYS))
    job.wait_for("at step 6", times=3)
    job.wait_for(STANDS)
    drain = _drain(hosts, "--no-move", first)
    job.wait_for(f"host {first}, which leads the job, is drained: .* and goes on with 2 ranks where another host leads")
    (tmp_path / "told").touch()
    job.wait_for("saved, and stays")
    for process in hosts.agents_of(third):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    code, text = drain.finish()
    assert code == 9 and f"host {first} leads the job, and no other host can take its place" in text, text
    code, text = job.finish()
    assert code == 0 and "Traceback" not in text, text
    assert f"host {third} is lost" in text and f"host {first} is not drained, and the job goes on here" in text, text
    assert re.search(r"restart 1 of 1 from \S+/step-0000000[67]\n", text), text
    totals = re.findall(r"steps [78] to 18 process \d+ sum (\S+)", text)
    alone = re.findall(r"sum (\S+)", run("-n", "1", "--no-pin", script(TRAINING, "plain.py")).stdout)[0]
    assert len(totals) == 3 and all(near(total, alone) for total in totals), (alone, text)
    assert hosts.log("a") == ""
    wait_until(lambda: not hosts.agents())
