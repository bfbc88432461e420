"""Checkpoints on a file system that two hosts see over a network: sshfs, mounted twice (this kernel may have no NFS). It has no
swap of folders, keeps locks to each mount, tells of a taken name no more than that it failed, and remembers for seconds what it saw."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from run_jobs import Run, end_soon, free_port, go_without, wait_until
from test_run_ssh import OVER_RUN, SERVER, _make_key

pytestmark = pytest.mark.more
Script = Callable[..., str]

SERVER_SAYS = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""


@pytest.fixture
def mounts(tmp_path: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Of one folder, `tmp_path / "export"`: as host a sees it, and as host b does."""
    if os.geteuid() != 0 or SERVER is None or shutil.which("sshfs") is None or not os.access("/dev/fuse", os.W_OK):
        go_without("sshfs", "no sshd and sshfs, /dev/fuse, root (scripts/install_services.sh)")
    if re.search(r"^root:!", pathlib.Path("/etc/shadow").read_text(), re.MULTILINE):
        go_without("sshfs", "root's account is locked")
    for key in ("host_key", "user_key"):
        _make_key(tmp_path / key)
    port, log = free_port(), tmp_path / "sshd.log"
    (tmp_path / "sshd_config").write_text(SERVER_SAYS.format(folder=tmp_path, port=port))
    command = ["unshare", "-m", "sh", "-c", OVER_RUN, "sh", SERVER, "-D", "-f", str(tmp_path / "sshd_config")]
    server = subprocess.Popen([*command, "-E", str(log)])
    (tmp_path / "export").mkdir()
    places = (tmp_path / "a", tmp_path / "b")
    sshfs: list[subprocess.Popen[bytes]] = []
    try:
        wait_until(lambda: server.poll() is not None or (log.exists() and "Server listening" in log.read_text()))
        options = f"IdentityFile={tmp_path}/user_key,IdentitiesOnly=yes,StrictHostKeyChecking=no"
        for place in places:
            place.mkdir()
            words = ["sshfs", "-f", "-p", str(port), "-o", f"{options},UserKnownHostsFile=/dev/null"]
            sshfs.append(subprocess.Popen([*words, f"root@127.0.0.1:{tmp_path}/export", str(place)]))
        wait_until(lambda: all(os.path.ismount(place) for place in places) or any(one.poll() for one in sshfs))
        assert all(os.path.ismount(place) for place in places), log.read_text()
        yield places
    finally:
        for place in places:
            subprocess.run(["umount", "-l", str(place)], capture_output=True)
        for one in (*sshfs, server):
            one.terminate()
            one.wait()


# Writes checkpoints under one name: `host folder how-many`. With "dies" it is killed in the midst of the last.
WRITES = """
import ctypes, os, pathlib, signal, sys
from evenstep import _core

os.environ["EVENSTEP_HOST_ID"], folder, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
content = ctypes.create_string_buffer(os.urandom(100000))
for step in range(count):
    writer = _core.CheckpointWriter(folder, True, 0)
    try:
        writer.add("model.safetensors", [("w", "U8", (100000,), ctypes.addressof(content), 100000)])
        if "dies" in sys.argv and step == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.commit('{"step": %d, "epoch": 0, "world_size": 1}' % step)
    finally:
        writer.abandon()
print("wrote", count)
"""


def writer(host: str, folder: pathlib.Path, count: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITES, host, str(folder), str(count), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_hosts_replace_one_name_at_once(mounts: tuple[pathlib.Path, pathlib.Path], program: pathlib.Path) -> None:
    """None of them fails, at every moment one is there and whole, and nothing else is left."""
    both = [writer(host, place / "best", 40) for host, place in zip("ab", mounts)]
    export = mounts[0].parent / "export"
    wait_until(lambda: (export / "best").exists() or any(one.poll() for one in both))
    looks = 0
    while any(one.poll() is None for one in both):
        # between the two renames the older one has the other name; what was read may be gone once both are written
        names = {path.name for path in export.iterdir() if (path / "manifest.json").exists()}
        looks += bool(names & {"best", "best.evenstep.replaced"})
    for one in both:
        text, _ = one.communicate(timeout=150)
        assert one.returncode == 0 and text.strip() == "wrote 40", text
    assert looks > 0 and [path.name for path in export.iterdir()] == ["best"]
    assert subprocess.run([str(program), "ckpt", "verify", str(export / "best")]).returncode == 0


def test_what_died_on_one_host_goes_there_alone(mounts: tuple[pathlib.Path, pathlib.Path]) -> None:
    a, b = mounts
    export = a.parent / "export"
    died = writer("a", a / "best", 1, "dies")
    died.communicate(timeout=150)
    assert died.returncode == -signal.SIGKILL and end_soon([died.pid])
    left = [path.name for path in export.iterdir()]
    assert left == ["best.evenstep.partial"]
    for host, place, stays in (("b", b, left), ("a", a, [])):
        text, _ = writer(host, place / f"of-{host}", 1).communicate(timeout=150)
        assert text.strip() == "wrote 1"
        assert [path.name for path in export.iterdir() if path.name.endswith(".partial")] == stays


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


def test_a_training_writes_there_and_goes_on_by_the_other_mount(
    mounts: tuple[pathlib.Path, pathlib.Path], run: Run, script: Script, program: pathlib.Path
) -> None:
    """Its own checkpoints by --checkpoint-dir, and one of the script's that is replaced."""
    for number, (place, host) in enumerate(zip(mounts, "ab")):
        name = script(TRAINS.replace("CKPT", str(place)), f"train_{host}.py")
        words = ("-n", str(2 + number), "--checkpoint-every", "4", "--keep", "2", "--checkpoint-dir", str(place / "c"))
        resumed = ("--resume", str(place / "c/step-00000016")) if number else ()
        done = run(
            *words, *resumed, "--log-rank", "0", name, str(20 * (number + 1) - 4), env={"EVENSTEP_HOST_ID": host}
        )
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        assert f"began at {16 * number}" in done.stdout
    export = mounts[0].parent / "export"
    kept = sorted(path.name for path in (export / "c").iterdir())
    assert kept == ["step-00000032", "step-00000036"] and sorted(os.listdir(export)) == ["best", "c"]
    whole = [str(program), "ckpt", "verify", str(export / "best"), *(str(export / "c" / name) for name in kept)]
    assert subprocess.run(whole).returncode == 0
