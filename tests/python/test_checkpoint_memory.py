"""`--checkpoint-memory`: a job restarts from the newest whole checkpoint in anybody's memory, newer than the disk's. Hosts are network
namespaces of this machine, each with a place of its own for its memory (root and ip)."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable

import pytest
import test_run_hosts
import three_hosts
from run_jobs import alive, wait_until

Script = Callable[[str], str]

two_names = test_run_hosts.names
three_names = three_hosts.names

TRAINING = """
    import os, pathlib, signal, time
    import torch
    import evenstep as es
    from evenstep.checkpoint import is_writing

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    memory = pathlib.Path(os.environ["EVENSTEP_CHECKPOINT_MEMORY"])
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    print("attempt", attempt, "rank", es.rank(), "begins at step", es.step(), flush=True)

    def newest_is(step):
        while not (memory / f"step-{step:08d}/manifest.json").exists():
            time.sleep(0.01)

    for _ in es.epochs(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            while is_writing():  # one that is due meanwhile is left out
                time.sleep(0.01)
            if attempt == 0 and es.step() == 8:
                END
    if es.is_main():
        total = sum(float(p.double().abs().sum()) for p in model.parameters())
        print(f"ended after {es.step()} steps with {total:.9f}", flush=True)
"""

KILLED = "if es.is_main(): newest_is(6); os.kill(os.getpid(), signal.SIGKILL)"
TORN = """if es.is_main():
                    newest_is(6)
                    file = memory / "step-00000006/optimizer.safetensors"
                    content = bytearray(file.read_bytes())
                    content[-1] ^= 1
                    file.write_bytes(content)
                    os.kill(os.getpid(), signal.SIGKILL)"""
WAITS = "time.sleep(600)"


def _end(text: str) -> str:
    (total,) = re.findall(r"ended after 12 steps with (\S+)", text)
    return str(total)


@pytest.mark.parametrize("torn", [False, pytest.param(True, marks=pytest.mark.more)])
def test_a_restart_goes_on_from_memory_where_that_is_whole(start, script, tmp_path: pathlib.Path, torn: bool) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    words = ["-n", "2", "--checkpoint-every", "4", "--checkpoint-memory", "3", "--name", "a"]
    name = script(TRAINING.replace("END", TORN if torn else KILLED))
    code, text = start(*words, name, before=["env", f"EVENSTEP_MEMORY_DIR={memory}"]).finish()
    assert code == 0, text
    assert "are kept in this host's memory" in text
    if torn:
        assert re.search(r"passed over: .*step-00000006.* is altered", text), text
        assert re.search(r"restart 1 of 3 from \S+/checkpoints/step-00000004\n", text), text
    else:
        assert re.search(r"restart 1 of 3 from \S+/memory/\S+/step-00000006 \(in memory\)", text), text
        assert "attempt 1 rank 0 begins at step 6" in text
    assert list(memory.iterdir()) == []  # it goes with the agent
    undisturbed = TRAINING.replace("END", "pass")
    code, plain = start("-n", "2", "--checkpoint-memory", "3", script(undisturbed, "plain.py")).finish()
    assert code == 0 and _end(plain) == _end(text)


def _place(folder: pathlib.Path) -> str:
    """A program that runs another one with this host's own memory: `over.sh HOST PROGRAM…`."""
    over = folder / "over.sh"
    over.write_text(
        f'#!/bin/sh\nmkdir -p "{folder}/memory-$1"\nexport EVENSTEP_MEMORY_DIR="{folder}/memory-$1"\nshift\nexec "$@"\n'
    )
    over.chmod(0o755)
    return str(over)


def test_another_host_has_it_in_its_memory(
    two_names: tuple[str, str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
) -> None:
    hosts = test_run_hosts.Hosts(two_names, program, tmp_path, environment)
    words = ["--name", "a", "--checkpoint-memory", "3", "--log-rank", "all"]
    job = hosts.start(*words, script(TRAINING.replace("END", WAITS)), before=f"{_place(tmp_path)} b")
    try:
        job.wait_for(
            rf"host {two_names[1]} has a copy of step-0000000\d in its memory, sent in \d+\.\d s \(\d+\.\d MB\)"
        )
        wait_until(lambda: list((tmp_path / "memory-b").glob("evenstep-memory-*/step-00000006/manifest.json")))
        (agent,) = hosts.agents()
        os.kill(agent, signal.SIGKILL)  # its memory goes with it, and it gets the checkpoint anew
        job.wait_for(r"restart 1 of 3 from \S+/step-00000006 \(in memory\)")
        code, text = job.finish()
        assert code == 0, text
        assert re.search(r"does not have \S+step-00000006: it is sent there", text), text
        assert len(re.findall(r"attempt 1 rank \d begins at step 6", text)) == 2, text
        assert re.search(r"\d+ copies of checkpoints were sent to other hosts", text), text
        wait_until(lambda: list((tmp_path / "memory-b").iterdir()) == [])
    finally:
        job.process.kill()


@pytest.mark.more
@pytest.mark.parametrize("copies", [1, 2])
def test_the_next_leader_goes_on_from_what_memory_has(
    three_names: list[str],
    script: Script,
    program: pathlib.Path,
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
) -> None:
    """The whole host of rank 0 is killed: its agent, guardian, keeper and ranks, and its memory with them. With one copy the
    next leader may be the host without: then the other's comes to it."""
    shell = three_hosts.SHELL.replace('exec "$name" "$@"', f'exec "$name" {_place(tmp_path)} "$name" "$@"')
    monkeypatch.setattr(three_hosts, "SHELL", shell)
    hosts = three_hosts.Hosts(three_names, program, tmp_path, environment)
    (tmp_path / "memory").mkdir()
    hosts.environment = {**environment, "EVENSTEP_MEMORY_DIR": str(tmp_path / "memory")}
    words = ["--name", "a", "--checkpoint-memory", "3", "--memory-copies", str(copies), "--log-rank", "all"]
    job = hosts.start(*words, script(TRAINING.replace("END", WAITS)))
    try:
        job.wait_for(r"has a copy of step-0000000\d in its memory", times=copies)
        wait_until(lambda: len(list(tmp_path.glob("memory-*/evenstep-memory-*/step-00000006/manifest.json"))) == copies)
        lost = subprocess.run(["ip", "netns", "pids", three_names[0]], capture_output=True, text=True).stdout.split()
        for process in lost:
            os.kill(int(process), signal.SIGKILL)
        wait_until(lambda: "a ended well" in hosts.log("a"))
        said = hosts.log("a")
        assert re.search(
            r"this host leads now \(generation 2\): restart 1 of 3 from \S+/step-00000006 \(in memory\)", said
        )
        assert len(re.findall(r"attempt 1 rank \d begins at step 6", said)) == 2, said
        wait_until(lambda: not hosts.agents())
    finally:
        for process in hosts.agents():
            os.kill(process, signal.SIGKILL)
        job.process.kill()
        assert not any(alive(process) for process in hosts.agents())


LOSES_ITS_WRITER = """
            if attempt == 0 and es.step() == 5 and es.is_main() and not pathlib.Path("lost").exists():
                pathlib.Path("lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if attempt == 0 and es.step() == 10:
                newest_is(9)
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
@pytest.mark.parametrize("recovery", ["shrink", "replace"])
def test_whoever_becomes_rank_zero_goes_on_keeping_them(start, script, tmp_path: pathlib.Path, recovery: str) -> None:
    """The rank that wrote them is lost, and the others go on in their processes; then all are lost, and restart from what
    another one has written."""
    memory = tmp_path / "memory"
    memory.mkdir()
    body = TRAINING.replace(
        "            if attempt == 0 and es.step() == 8:\n                END\n", LOSES_ITS_WRITER.removeprefix("\n")
    )
    words = ["-n", "3", "--no-pin", "--recovery", recovery, "--checkpoint-memory", "3", "--log-rank", "all"]
    code, text = start(*words, script(body), before=["env", f"EVENSTEP_MEMORY_DIR={memory}"]).finish()
    assert code == 0, text
    assert "without rank 0" in text or "rank 0 joins" in text, text
    assert re.search(r"restart 1 of 3 from \S+/memory/\S+/step-00000009 \(in memory\)", text), text
    assert len(re.findall(r"attempt 1 rank \d begins at step 9", text)) == 3, text
    assert list(memory.iterdir()) == []
    undisturbed = TRAINING.replace("END", "pass")
    code, plain = start("-n", "3", "--no-pin", "--checkpoint-memory", "3", script(undisturbed, "plain.py")).finish()
    assert code == 0 and float(_end(plain)) == pytest.approx(float(_end(text)), rel=1e-9)
