"""What is asked of checkpoints in a folder that two hosts have mounted, `a` and `b`; `export` is the folder itself, where it lies."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

from run_jobs import Run, end_soon, wait_until

Script = Callable[..., str]


@dataclasses.dataclass(frozen=True)
class Mounts:
    export: pathlib.Path
    a: pathlib.Path
    b: pathlib.Path

    def names(self) -> list[str]:
        return sorted(path.name for path in self.export.iterdir())


# Writes checkpoints under one name: `host folder how-many`. With "again" it waits where the other host is known to write it; with "dies" it is killed
# in the midst of the last; with "waits" it does not end that before a line comes.
WRITES = """
import ctypes, os, pathlib, signal, sys
from evenstep import _core

os.environ["EVENSTEP_HOST_ID"], folder, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
content = ctypes.create_string_buffer(os.urandom(100000))
for step in range(count):
    while True:
        try:
            writer = _core.CheckpointWriter(folder, True, 0)
            break
        except _core.EvenstepError as error:
            if "again" not in sys.argv or error.status != "EVEN_ERR_IN_USE":
                raise
    try:
        writer.add("model.safetensors", [("w", "U8", (100000,), ctypes.addressof(content), 100000)])
        if "dies" in sys.argv and step == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if "waits" in sys.argv and step == count - 1:
            print("begun", flush=True)
            sys.stdin.readline()
        writer.add("more.safetensors", [("w", "U8", (100000,), ctypes.addressof(content), 100000)])
        writer.commit('{"step": %d, "epoch": 0, "world_size": 1}' % step)
    finally:
        writer.abandon()
print("wrote", count)
"""


def writer(host: str, folder: pathlib.Path, count: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITES, host, str(folder), str(count), *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def verify(program: pathlib.Path, *folders: pathlib.Path) -> None:
    done = subprocess.run([program, "ckpt", "verify", *folders], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def two_hosts_replace_one_name_at_once(mounts: Mounts, program: pathlib.Path, count: int, *words: str) -> None:
    """None of them fails, at every moment one is there and whole, and nothing else is left. Where locks are seen between the
    hosts, each is told that the other writes ("again"); else they take turns."""
    both = [writer("a", mounts.a / "best", count, *words), writer("b", mounts.b / "best", count, *words)]
    wait_until(lambda: (mounts.export / "best").exists() or any(one.poll() for one in both))
    looks = 0
    while any(one.poll() is None for one in both):
        # between the two renames the older one has the other name; what was read may be gone once both are written
        names = {path.name for path in mounts.export.iterdir() if (path / "manifest.json").exists()}
        looks += bool(names & {"best", "best.evenstep.replaced"})
    for one in both:
        text, _ = one.communicate(timeout=150)
        assert one.returncode == 0 and text.strip() == f"wrote {count}", text
    assert looks > 0 and mounts.names() == ["best"]
    verify(program, mounts.export / "best")


def what_died_on_one_host_goes_there_alone(mounts: Mounts) -> None:
    died = writer("a", mounts.a / "best", 1, "dies")
    died.communicate(timeout=150)
    assert died.returncode == -signal.SIGKILL and end_soon([died.pid])
    left = mounts.names()
    assert left == ["best.evenstep.partial"]
    for host, place, stays in (("b", mounts.b, left), ("a", mounts.a, [])):
        text, _ = writer(host, place / f"of-{host}", 1).communicate(timeout=150)
        assert text.strip() == "wrote 1"
        assert [name for name in mounts.names() if name.endswith(".partial")] == stays


TRAINS = """
    import sys
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 200), torch.nn.Linear(200, 1))
    model[0].weight.requires_grad = False
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    print("began at", es.step(), flush=True)
    for epoch in es.epochs(9):
        for x, in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if es.step() == int(sys.argv[1]):
                break
        if es.step() == int(sys.argv[1]):
            break
        es.checkpoint("CKPT/best")
"""


def a_training_writes_there_and_goes_on_by_the_other_mount(
    mounts: Mounts, run: Run, script: Script, program: pathlib.Path
) -> None:
    """Its own checkpoints by --checkpoint-dir, and one of the script's that is replaced."""
    for number, (place, host) in enumerate(((mounts.a, "a"), (mounts.b, "b"))):
        name = script(TRAINS.replace("CKPT", str(place)), f"train_{host}.py")
        words = ("-n", str(2 + number), "--checkpoint-every", "4", "--keep", "2", "--checkpoint-dir", str(place / "c"))
        resumed = ("--resume", str(place / "c/step-00000016")) if number else ()
        done = run(
            *words, *resumed, "--log-rank", "0", name, str(20 * (number + 1) - 4), env={"EVENSTEP_HOST_ID": host}
        )
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        assert f"began at {16 * number}" in done.stdout
    kept = sorted(os.listdir(mounts.export / "c"))
    assert kept == ["step-00000032", "step-00000036"] and mounts.names() == ["best", "c"]
    verify(program, mounts.export / "best", *(mounts.export / "c" / name for name in kept))
