"""Checkpoints on a file system that two hosts see over a network: sshfs, mounted twice (this kernel may have no NFS). It has no
swap of folders, keeps locks to each mount, tells of a taken name no more than that it failed, and remembers for seconds what it saw."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import two_mounts
from run_jobs import Run, free_port, go_without, wait_until
from test_run_ssh import OVER_RUN, SERVER, _make_key
from two_mounts import Mounts, Script

pytestmark = pytest.mark.more

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
def mounts(tmp_path: pathlib.Path) -> Iterator[Mounts]:
    """Of one folder: as host a sees it, and as host b does."""
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
        yield Mounts(tmp_path / "export", *places)
    finally:
        for place in places:
            subprocess.run(["umount", "-l", str(place)], capture_output=True)
        for one in (*sshfs, server):
            one.terminate()
            one.wait()


def test_two_hosts_replace_one_name_at_once(mounts: Mounts, program: pathlib.Path) -> None:
    two_mounts.two_hosts_replace_one_name_at_once(mounts, program, 40)


def test_what_died_on_one_host_goes_there_alone(mounts: Mounts) -> None:
    two_mounts.what_died_on_one_host_goes_there_alone(mounts)


def test_a_training_writes_there_and_goes_on_by_the_other_mount(
    mounts: Mounts, run: Run, script: Script, program: pathlib.Path
) -> None:
    two_mounts.a_training_writes_there_and_goes_on_by_the_other_mount(mounts, run, script, program)
