"""Checkpoints on a real NFS, mounted by two hosts: run in the guest of scripts/nfs_guest.sh (by test_nfs.py), which has set
up what these tests need. NFS 4.2 as a user mounts it, and NFS 3 without locks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import two_mounts
from run_jobs import wait_until
from two_mounts import Mounts, verify, writer

from evenstep import _core

EXPORT, SERVER = pathlib.Path("/export"), "10.81.0.254"
if os.environ.get("EVENSTEP_TEST_NFS") != "1":
    pytest.skip("not in the guest of scripts/nfs_guest.sh", allow_module_level=True)


def on(host: str, *words: str) -> list[str]:
    """A command with that host's network and name."""
    return [
        "nsenter",
        f"--net=/run/netns/{host}",
        "unshare",
        "-u",
        "sh",
        "-c",
        'hostname "$0" && exec "$@"',
        host,
        *words,
    ]


def stop_server() -> None:
    """Nothing is answered from then on."""
    subprocess.run(["rpc.nfsd", "0"], check=True)
    assert pathlib.Path("/proc/fs/nfsd/threads").read_text().strip() == "0"


def start_server() -> None:
    subprocess.run(["rpc.nfsd", "8"], check=True)


def mounted(root: str, name: str) -> Mounts:
    (EXPORT / name).mkdir()
    return Mounts(EXPORT / name, pathlib.Path(root) / "a" / name, pathlib.Path(root) / "b" / name)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a folder of the server's own to a test."""
    yield (made := f"test-{os.getpid()}-{abs(hash(request.node.name))}")
    shutil.rmtree(EXPORT / made, ignore_errors=True)


@pytest.fixture
def nfs4(name: str) -> Mounts:
    return mounted("/nfs", name)


@pytest.fixture
def nfs3(name: str) -> Mounts:
    return mounted("/nfs3", name)


@pytest.fixture(params=["nfs4", "nfs3"])
def mounts(request: pytest.FixtureRequest, name: str) -> Mounts:
    return mounted("/nfs" if request.param == "nfs4" else "/nfs3", name)


def wrote(one: subprocess.Popen[str], said: str | None = None) -> None:
    text, _ = one.communicate(said, timeout=150)
    assert one.returncode == 0 and text.splitlines()[-1].startswith("wrote"), text


def begin(host: str, folder: pathlib.Path) -> subprocess.Popen[str]:
    """A writer in the midst of its checkpoint."""
    one = writer(host, folder, 1, "waits")
    assert one.stdout is not None and one.stdout.readline() == "begun\n", one.communicate()
    return one


def is_held_up(pid: int) -> bool:
    """Whether a thread of it waits in the kernel for a file system."""
    states = [
        path.read_text().rpartition(")")[2].split()[0] for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return "D" in states


def make_old(mounts: Mounts, partial: str) -> None:
    """Nothing in it was written to for years."""
    for path in (*(mounts.export / partial).iterdir(), mounts.export / partial):
        os.utime(path, (1e9, 1e9))


# ---- what sshfs is asked, too ----


def test_two_hosts_replace_one_name_at_once(nfs4: Mounts, program: pathlib.Path) -> None:
    two_mounts.two_hosts_replace_one_name_at_once(nfs4, program, 12, "again")


def test_two_hosts_replace_one_name_at_once_without_locks(nfs3: Mounts, program: pathlib.Path) -> None:
    two_mounts.two_hosts_replace_one_name_at_once(nfs3, program, 12)


def test_what_died_on_one_host_goes_there_alone(mounts: Mounts) -> None:
    two_mounts.what_died_on_one_host_goes_there_alone(mounts)


# ---- what another host has just written, or removed ----


def test_the_newest_is_seen_at_once(mounts: Mounts, program: pathlib.Path) -> None:
    """A host that has just listed a folder remembers what it saw for half a minute, unless it asks the server."""
    (mounts.a / "c").mkdir()
    for step in range(1, 4):
        assert len(os.listdir(mounts.b / "c")) == step - 1
        wrote(writer("a", mounts.a / "c" / f"step-{step:08d}", 1))
        done = subprocess.run([program, "ckpt", "ls", mounts.b / "c"], capture_output=True, text=True, timeout=150)
        assert done.returncode == 0 and f"step-{step:08d}" in done.stdout, done.stdout + done.stderr


def test_a_name_that_was_not_there_is_seen_once_its_folder_is_listed(mounts: Mounts, program: pathlib.Path) -> None:
    """Without that a client may say for half a minute that it is not there."""
    ask = [program, "ckpt", "verify", mounts.b / "best"]
    assert subprocess.run(ask, capture_output=True, timeout=150).returncode != 0
    wrote(writer("a", mounts.a / "best", 1))
    assert os.listdir(mounts.b) == ["best"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_another_host_removes_is_gone(mounts: Mounts, program: pathlib.Path) -> None:
    wrote(writer("a", mounts.a / "best", 1))
    verify(program, mounts.b / "best")
    _core.checkpoint_remove(mounts.a / "best")
    done = subprocess.run([program, "ckpt", "verify", mounts.b / "best"], capture_output=True, text=True, timeout=150)
    assert done.returncode != 0 and "best" in done.stderr and mounts.names() == [], done.stderr
    wrote(writer("b", mounts.b / "best", 1))
    verify(program, mounts.a / "best")


def test_what_somebody_reads_loses_its_name_all_the_same(mounts: Mounts) -> None:
    """The client keeps what a process of its own has open, under a name of its own in that folder."""
    wrote(writer("a", mounts.a / "best", 1))
    with open(mounts.a / "best" / "model.safetensors", "rb") as reader:
        with pytest.raises(_core.EvenstepError, match="Directory not empty"):
            _core.checkpoint_remove(mounts.a / "best")
        assert not (mounts.export / "best").exists()
        assert len(reader.read()) > 100000
    wrote(writer("a", mounts.a / "next", 1))
    assert mounts.names() == ["best.evenstep.partial", "next"]  # until it has been there for ten minutes


# ---- who lives ----


def test_a_living_writer_of_another_host_is_left_alone(nfs4: Mounts, program: pathlib.Path) -> None:
    """However long it is silent: its lock is seen there."""
    living = begin("a", nfs4.a / "best")
    make_old(nfs4, "best.evenstep.partial")
    wrote(writer("b", nfs4.b / "other", 1))
    text, _ = writer("b", nfs4.b / "best", 1).communicate(timeout=150)
    assert "is being written by another process" in text, text
    wrote(living, "\n")
    assert nfs4.names() == sorted(os.listdir(nfs4.b)) == ["best", "other"]
    verify(program, nfs4.b / "best", nfs4.a / "other")


def test_a_silent_writer_without_locks_fails_and_leaves_nothing_half(nfs3: Mounts, program: pathlib.Path) -> None:
    silent = begin("a", nfs3.a / "best")
    make_old(nfs3, "best.evenstep.partial")
    wrote(writer("b", nfs3.b / "other", 1))
    text, _ = silent.communicate("\n", timeout=150)
    assert silent.returncode != 0 and "EVEN_ERR_" in text, text
    wrote(writer("a", nfs3.a / "best", 1))
    assert nfs3.names() == ["best", "other"]
    verify(program, nfs3.b / "best")


# ---- a server that stops, a host that is cut off ----


def test_a_server_that_stops_holds_up_a_writer_and_loses_nothing(mounts: Mounts, program: pathlib.Path) -> None:
    living = begin("a", mounts.a / "best")
    stop_server()
    assert living.stdin is not None
    living.stdin.write("\n")
    living.stdin.flush()
    wait_until(lambda: living.poll() is not None or is_held_up(living.pid))
    try:
        assert living.poll() is None and mounts.names() == ["best.evenstep.partial"]
    finally:
        start_server()
    wrote(living)
    assert mounts.names() == ["best"]
    verify(program, mounts.b / "best")


def test_a_lock_outlasts_its_server(nfs4: Mounts, program: pathlib.Path) -> None:
    """It is claimed anew before another host may ask."""
    living = begin("a", nfs4.a / "best")
    stop_server()
    start_server()
    text, _ = writer("b", nfs4.b / "best", 1).communicate(timeout=150)
    assert "is being written by another process" in text, text
    wrote(living, "\n")
    verify(program, nfs4.b / "best")


def test_a_host_that_is_cut_off_for_longer_than_its_lease(nfs4: Mounts, program: pathlib.Path) -> None:
    """Its locks are another's to take then. The other does not wait for its name; both of them end with a whole one."""
    cut = begin("a", nfs4.a / "best")
    subprocess.run(["ip", "-n", "a", "link", "set", "eth0", "down"], check=True)
    try:
        for _ in range(60):
            text, _ = (other := writer("b", nfs4.b / "best", 1)).communicate(timeout=150)
            if other.returncode == 0:
                break
            assert "is being written by another process" in text, text
        assert other.returncode == 0
        verify(program, nfs4.b / "best")
    finally:
        subprocess.run(["ip", "-n", "a", "link", "set", "eth0", "up"], check=True)
    text, _ = cut.communicate("\n", timeout=150)
    assert cut.returncode == 0 or "EVEN_ERR" in text, text
    verify(program, nfs4.b / "best", nfs4.a / "best")
    wrote(writer("a", nfs4.a / "best", 1))
    assert nfs4.names() == ["best"]


@contextlib.contextmanager
def soft_mount(place: pathlib.Path) -> Iterator[None]:
    """On host a: calls to a server that does not answer fail."""
    place.mkdir()
    options = "vers=4.2,soft,timeo=10,retrans=1,nosharecache"
    subprocess.run(on("a", "mount", "-t", "nfs4", "-o", options, f"{SERVER}:/", str(place)), check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_save_on_a_soft_mount_fails_and_the_next_is_whole(
    nfs4: Mounts, name: str, program: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with soft_mount(tmp_path / "soft"):
        place = tmp_path / "soft" / name / "best"
        failed = begin("a", place)
        stop_server()
        text, _ = failed.communicate("\n", timeout=150)
        start_server()
        assert failed.returncode != 0 and "EVEN_ERR_" in text, text
        wait_until(lambda: (again := writer("a", place, 1)).communicate(timeout=150) and again.returncode == 0)
        assert nfs4.names() == ["best"]
        verify(program, nfs4.b / "best")
