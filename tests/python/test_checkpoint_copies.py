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
import three_hosts
from run_jobs import alive, wait_until

Script = Callable[[str], str]

two_names = test_run_hosts.names
three_names = three_hosts.names

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


# It stands behind its checkpoint until it is told to end or to go on; then it says how far it is from one device's plain
# training.
SCRIPT = three_hosts.TRAINING.replace(
    "while attempt == 0 and es.step() >= 8:\n",
    """while attempt == 0 and es.step() >= 8 and not os.path.exists("go"):
                if os.path.exists("end"):
                    os.kill(os.getpid(), 9)
""",
)
COMPARED = """
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    plain = torch.nn.Linear(6, 2)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=12):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(model.parameters(), plain.parameters()))
    print("as one device does" if off < 1e-12 else f"differs by {off}", flush=True)
"""


def _start(hosts: test_run_hosts.Hosts, folder: pathlib.Path, training: pathlib.Path, *words: str) -> Any:
    """A job whose second host has a disk of its own, and copies there."""
    words = ("--name", "a", "--checkpoint-every", "5", "--checkpoint-copies", "1", "--log-rank", "all", *words)
    return hosts.start(*words, training, before=f"{_disk(folder)} b")


def _bytes(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _assert_ended(code: int, text: str, host: str, attempt: int) -> None:
    """The copy came back, and training went on from it as if nothing had been."""
    assert code == 0, text
    assert f"host {host} has {STEP}, newer than all that is whole here: it is brought back" in text, text
    assert re.search(rf"{STEP} was brought back from host {host} in \d+\.\d s", text), text
    assert len(re.findall(rf"attempt {attempt} rank \d of 2 begins at step 5", text)) == 2, text
    assert len(re.findall("as one device does", text)) == 2, text


def test_the_other_host_has_a_copy_when_this_one_is_lost(
    two_names: tuple[str, str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
) -> None:
    """Its disk, too: started again, on an empty one, the job goes on from the copy."""
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    trains = script(SCRIPT + COMPARED)
    job = _start(hosts, tmp_path, trains)
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
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "go").touch()
    job = _start(hosts, tmp_path, trains, "--resume", "auto")
    try:
        code, text = job.finish()
    finally:
        job.process.kill()
    _assert_ended(code, text, two_names[1], 0)
    assert re.search(rf"training begins from \S+/runs/a/checkpoints/{STEP} \(--resume\)", text), text


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.more)])
def test_what_a_copy_holds_is_not_trained_again(
    two_names: tuple[str, str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    lost: bool,
) -> None:
    """The folder of checkpoints is emptied before a restart: the copy comes back. Where its host is lost at the same time
    nothing is trained again unasked."""
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    there = tmp_path / "there-b/a/checkpoints" / STEP
    job = _start(hosts, tmp_path, script(SCRIPT + COMPARED))
    try:
        job.wait_for(rf"host {two_names[1]} has a copy of {STEP}, sent in")
        copy = _bytes(there)
        shutil.rmtree(tmp_path / "runs/a/checkpoints")
        if lost:
            (agent,) = hosts.agents()
            os.kill(agent, signal.SIGKILL)
        else:
            (tmp_path / "end").touch()
        code, text = job.finish()
    finally:
        job.process.kill()
        job.finish()
    if lost:
        assert code == 3 and f"it is not begun anew, for host {two_names[1]} has a copy of {STEP} (/" in text, text
        assert re.search(rf"fix: copy it back into \S+ \(rsync -a {two_names[1]}:/", text), text
        assert _bytes(there) == copy
    else:
        _assert_ended(code, text, two_names[1], 1)
        assert _bytes(tmp_path / "runs/a/checkpoints" / STEP) == copy


@pytest.mark.more
@pytest.mark.parametrize("copies", [1, 2])
def test_the_next_leader_goes_on_from_a_copy(
    three_names: list[str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
) -> None:
    """Its own, or, with one copy, another host's, which comes to it."""
    shell = three_hosts.SHELL.replace('exec "$name" "$@"', f'exec "$name" {_disk(tmp_path)} "$name" "$@"')
    monkeypatch.setattr(three_hosts, "SHELL", shell)
    hosts = three_hosts.Hosts(three_names, program, tmp_path, environment)
    disks = [tmp_path / f"there-{name}/a" for name in three_names[1:]]

    def said() -> str:
        logs = [disk / "logs/leader.log" for disk in disks]
        return "".join(log.read_text() for log in logs if log.exists())

    words = ["--name", "a", "--checkpoint-every", "5", "--checkpoint-copies", str(copies), "--log-rank", "all"]
    job = hosts.start(*words, script(three_hosts.TRAINING))
    try:
        job.wait_for(rf"has a copy of {STEP}", times=copies)
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
