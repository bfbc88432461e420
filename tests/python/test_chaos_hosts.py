"""evenstep chaos on hosts of the user's own (here network namespaces, with a shell in ssh's place): each has a part of
chaos that does faults there, and lets go of all that it holds when its connection ends."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import three_hosts
from run_jobs import end_all, wait_until
from test_chaos import TRAINING
from test_run_hosts import Hosts
from test_run_hosts import hosts as hosts  # a fixture
from test_run_hosts import names as names  # a fixture

Script = Callable[[str], str]

three_names = three_hosts.names


# ---- the part itself ----


class Part:
    """What runs on another host, and a process there that looks like a rank."""

    def __init__(self, program: pathlib.Path, environment: dict[str, str]) -> None:
        marked = {**os.environ, "TORCHELASTIC_RUN_ID": "ours", "RANK": "1"}
        sleeps = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
        self.rank = subprocess.Popen(sleeps, env=marked, stdout=subprocess.PIPE, text=True)
        self.part = subprocess.Popen(
            [str(program), "chaos", "--part"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.rank.stdout and self.rank.stdout.readline() == "up\n"
        assert self._hear().startswith("ready ")

    def _hear(self) -> str:
        assert self.part.stdout
        return self.part.stdout.readline()

    def do(self, kind: str) -> str:
        assert self.part.stdin
        self.part.stdin.write(f"do {kind} ours 1 {self.rank.pid} 1000 7\n")
        self.part.stdin.flush()
        return self._hear()

    def state(self) -> str:
        return pathlib.Path(f"/proc/{self.rank.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def limit(self) -> str:
        lines = pathlib.Path(f"/proc/{self.rank.pid}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max address space")).split()[3]

    def end(self) -> None:
        for process in (self.part, self.rank):
            process.kill()
            process.communicate()


@pytest.fixture
def part(program: pathlib.Path, environment: dict[str, str]) -> Iterator[Part]:
    one = Part(program, environment)
    yield one
    one.end()


@pytest.mark.parametrize("end", ["connection", "SIGTERM", "SIGHUP"])
def test_a_part_lets_go_of_all_when_it_ends(part: Part, end: str) -> None:
    before = part.limit()
    assert part.do("stop").startswith("done 0 rank 1 (process ")
    assert part.do("out-of-memory").startswith("done 1 rank 1 (process ")
    wait_until(lambda: part.state() == "T")
    assert part.limit() != before
    if end == "connection":  # also where nobody hears it any more
        assert part.part.stdin and part.part.stdout
        part.part.stdin.write(f"do stop ours 1 {part.rank.pid} 1000 7\n")
        part.part.stdout.close()
        part.part.stdin.close()
        part.part.stdin = part.part.stdout = None
    else:
        part.part.send_signal(getattr(signal, end))
    assert part.part.wait(60) == 0
    wait_until(lambda: part.state() == "S")
    assert part.limit() == before


def test_a_part_says_what_it_does_not_know(part: Part) -> None:
    said = part.do("partition")
    assert said == f'not "do partition ours 1 {part.rank.pid} 1000 7" is nothing that a part of evenstep chaos does\n'
    part.rank.kill()
    part.rank.wait()
    assert part.do("kill") == "later\n"


# ---- jobs ----


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("exit 1", 7, "host b: evenstep chaos could not be started there"),
        ("echo 'no route to b' >&2; exit 255", 7, "host b: no route to b"),
        ("echo ready 0.0.1; read line", 8, "host b has evenstep 0.0.1, and this one "),
    ],
)
def test_a_host_that_cannot_be_reached_is_told_before_anything_is_trained(
    program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str], shell: str, code: int, said: str
) -> None:
    reaches = tmp_path / "shell.sh"
    reaches.write_text(f"#!/bin/sh\n{shell}\n")
    reaches.chmod(0o755)
    done = subprocess.run(
        [str(program), "chaos", "--hosts", "a,b", "--ssh", str(reaches), "-n", "1", "train.py"],
        cwd=tmp_path,
        env={**environment, "EVENSTEP_HOST_ID": "a"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "runs").exists()


def disturb(hosts: Hosts, shell: str, *words: str) -> dict[str, Any]:
    """What came out of both hosts' training under faults, which has to be as without."""
    here, there = hosts.names
    command = ["ip", "netns", "exec", here, "env", f"EVENSTEP_HOST_ID={here}", str(hosts.program), "chaos"]
    command += ["--hosts", f"{here},{there}", "--ssh", shell, "-n", "1", "--no-pin", "--json", "--name", "a", *words]
    done = subprocess.run(
        command,
        cwd=hosts.folder,
        env=hosts.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["kept"] and found["numbers_that_differ"] == 0, found
    assert all(fault["injected"] for fault in found["faults"]), found
    return found


def test_a_rank_there_is_killed_and_trains_again(hosts: Hosts, script: Script) -> None:
    """By this seed the rank is the other host's."""
    options = ("--seed", "12", "--faults", "1", "--kinds", "kill")
    found = disturb(hosts, hosts.shell(), *options, script(TRAINING), "1", "1", "100")
    (fault,) = found["faults"]
    assert fault["what"].startswith(f"host {hosts.names[1]}: rank 1 (process "), fault
    assert fault["noticed_ns"] > fault["at_ns"] and fault["again_from"] >= fault["held"], fault


# The second half is slow until the rank has stood still: the faults before that come meanwhile, each after a step.
SLOW = TRAINING.replace(
    "        loss.backward()\n",
    """        loss.backward()
        if epoch >= 30 and disturbed:
            time.sleep(0.5 if attempt == 0 else 0.05)
""",
)


@pytest.mark.more
def test_all_that_a_part_does_comes_to_the_other_host(hosts: Hosts, script: Script) -> None:
    """By this seed to its agent, and to its rank."""
    options = ("--seed", "450", "--faults", "5", "--kinds", "stop,slow,garbage,agent,twin")
    found = disturb(hosts, hosts.shell(), *options, script(SLOW), "1", "0", "0")
    what = {fault["kind"]: fault["what"] for fault in found["faults"]}
    assert f", of host {hosts.names[1]}; another one went on with its ranks" in what.pop("agent"), what
    assert all(words.startswith(f"host {hosts.names[1]}: ") for words in what.values()), what
    assert "rank 1" in what["stop"] and "rank 1" in what["slow"] and "ports " in what["garbage"], what
    assert "claims to be rank 1" in what["twin"], what


OVER = """#!/bin/sh
disk=there-$1
shift
mkdir -p runs "$disk" && mount --bind "$disk" runs && exec "$@"
"""


@pytest.mark.more
def test_with_a_witness_and_copies(
    three_names: list[str],
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    script: Script,
) -> None:
    """Each host has a disk of its own. By this seed a checkpoint is damaged, the other host's agent is killed, its rank."""
    over = tmp_path / "over.sh"
    over.write_text(OVER)
    over.chmod(0o755)
    hosts = Hosts((three_names[0], three_names[1]), program, tmp_path, environment)
    options = ("--witness", three_names[2], "--checkpoint-copies", "1")
    options += ("--seed", "80", "--faults", "3", "--kinds", "kill,agent,bit-flip")
    try:
        found = disturb(hosts, hosts.shell(f'unshare -m {over} "$name"'), *options, script(TRAINING), "1", "2", "20")
    finally:
        end_all([], hosts.agents)
    assert [fault["kind"] for fault in found["faults"]] == ["bit-flip", "agent", "kill"], found
    assert f", of host {hosts.names[1]}" in found["faults"][1]["what"], found
    assert list((tmp_path / f"there-{hosts.names[1]}/a-disturbed/checkpoints").glob("step-*/manifest.json"))
