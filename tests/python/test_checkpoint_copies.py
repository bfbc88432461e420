"""`--checkpoint-copies`: what is left of a training when the host with its checkpoints is lost. Each host has a disk of its
own: nothing under `runs` is seen by two (network namespaces of this machine; root and ip)."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import test_run_hosts
import test_run_succession
from run_jobs import alive, wait_until

Script = Callable[[str], str]

two_names = test_run_hosts.names
three_names = test_run_succession.names

STEP = "step-00000005"

OVER = """#!/bin/sh
disk=there-$1
shift
mkdir -p runs "$disk" && mount --bind "$disk" runs && exec "$@"
"""


def _disk(folder: pathlib.Path) -> str:
    over = folder / "over.sh"
    over.write_text(OVER)
    over.chmod(0o755)
    return f"unshare -m {over}"


def _start(hosts: test_run_hosts.Hosts, folder: pathlib.Path, training: pathlib.Path) -> Any:
    """A job whose second host has a disk of its own, and copies there."""
    words = ["--name", "a", "--checkpoint-every", "5", "--checkpoint-copies", "1", "--log-rank", "all"]
    return hosts.start(*words, training, before=f"{_disk(folder)} b")


def test_the_other_host_has_a_copy_when_this_one_is_lost(
    two_names: tuple[str, str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
) -> None:
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    job = _start(hosts, tmp_path, script(test_run_succession.TRAINING))
    try:
        job.wait_for(rf"host {two_names[1]} has a copy of {STEP}, sent in \d+\.\d s")
        (agent,) = hosts.agents()
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(agent))
    finally:
        job.process.kill()
        job.finish()
    folder = tmp_path / "there-b/a/checkpoints"
    assert [path.name for path in folder.iterdir()] == [STEP]
    verify = [str(program), "ckpt", "verify", str(folder / STEP)]
    assert subprocess.run(verify, timeout=150).returncode == 0


# It stands behind its checkpoint until it is told to end.
ENDED = test_run_succession.TRAINING.replace(
    "time.sleep(0.01)", 'os.kill(os.getpid(), 9) if os.path.exists("end") else time.sleep(0.01)'
)


def test_what_a_copy_holds_is_not_trained_again_unasked(
    two_names: tuple[str, str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
) -> None:
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    job = _start(hosts, tmp_path, script(ENDED))
    try:
        job.wait_for(rf"host {two_names[1]} has a copy of {STEP}, sent in")
        shutil.rmtree(tmp_path / "runs/a/checkpoints")
        (tmp_path / "end").touch()
        code, text = job.finish()
    finally:
        job.process.kill()
        job.finish()
    assert code == 3 and f"it is not begun anew, for host {two_names[1]} has a copy of {STEP} (/" in text, text
    assert re.search(rf"fix: copy it back into \S+ \(rsync -a {two_names[1]}:/", text), text
    assert [path.name for path in (tmp_path / "there-b/a/checkpoints").iterdir()] == [STEP]


@pytest.mark.more
def test_the_next_leader_goes_on_from_its_copy(
    three_names: list[str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = test_run_succession.SHELL.replace('exec "$name" "$@"', f'exec "$name" {_disk(tmp_path)} "$name" "$@"')
    monkeypatch.setattr(test_run_succession, "SHELL", shell)
    hosts = test_run_succession.Hosts(three_names, program, tmp_path, environment)
    disks = [tmp_path / f"there-{name}/a" for name in three_names[1:]]

    def said() -> str:
        logs = [disk / "logs/leader.log" for disk in disks]
        return "".join(log.read_text() for log in logs if log.exists())

    words = ["--name", "a", "--checkpoint-every", "5", "--checkpoint-copies", "2", "--log-rank", "all"]
    job = hosts.start(*words, script(test_run_succession.TRAINING))
    try:
        job.wait_for(rf"has a copy of {STEP}", times=2)
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: "a ended well" in said())
        assert re.search(rf"this host leads now \(generation 2\): restart 1 of 3 from \S+/{STEP}", said()), said()
        assert len(re.findall(r"attempt 1 rank \d of 2 begins at step 5", said())) == 2, said()
        assert len(re.findall("ended after 12 steps", said())) == 2, said()
        wait_until(lambda: not hosts.agents())
    finally:
        for process in hosts.agents():
            os.kill(process, signal.SIGKILL)
        job.process.kill()
        job.finish()
