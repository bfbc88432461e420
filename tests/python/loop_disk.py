"""File systems of their own in a file, mounted by a loop device: for what a file system does that a test's folder may not."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

from run_jobs import go_without

MAKES = {
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
}
BYTES = 320 << 20  # the smallest that all take
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def make_image(kind: str, image: pathlib.Path) -> pathlib.Path:
    """A file with an empty file system of that kind. Goes without where it cannot be made, or not mounted."""
    program = shutil.which(MAKES[kind][0], path=_PATH)
    if os.geteuid() != 0 or program is None:
        go_without("disks", f"no {MAKES[kind][0]}, or no root to mount (scripts/install_services.sh)")
    with image.open("wb") as file:
        file.truncate(BYTES)
    subprocess.run([program, *MAKES[kind][1:], str(image)], check=True, capture_output=True)
    return image


@contextlib.contextmanager
def mounted(image: pathlib.Path, place: pathlib.Path) -> Iterator[pathlib.Path]:
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        go_without("disks", f"no loop devices: {done.stderr.strip()}")
    try:
        yield place
    finally:
        if subprocess.run(["umount", str(place)], capture_output=True).returncode != 0:
            subprocess.run(["umount", "-l", str(place)], check=True)


def used_bytes(place: pathlib.Path) -> int:
    """On the disk, once all is there."""
    fd = os.open(place, os.O_RDONLY)
    try:
        subprocess.run(["sync", "-f", str(place)], check=True)
        facts = os.fstatvfs(fd)
    finally:
        os.close(fd)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
