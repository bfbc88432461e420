"""Automatic checkpoints on a full disk: they wait until it has room, and training goes on. Whoever is told of it once knows
it: the terminal and the history say when they begin to wait, and when they are written again. No older checkpoint is removed
for room: the newest whole one is what a failure goes back to."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from evenstep import _core

# What a file system needs beside a checkpoint's own bytes: blocks that files do not fill, folders.
_BESIDE = 1 << 17


def is_full(error: BaseException) -> bool:
    """Whether it says that a disk, or this user's part of it, is full."""
    if getattr(error, "status", "") == "EVEN_ERR_NO_SPACE":
        return True
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in causes)


class Room:
    """What rank 0 knows of the disk for its automatic checkpoints. The thread that writes them may call it, too."""

    def __init__(self) -> None:
        self._bytes = 0  # of the checkpoint now being written
        self._folder = Path()
        self._waits = False

    def is_lacking(self) -> bool:
        """Whether the disk was found full, and still has no room for a checkpoint as large as the one that found it so."""
        if not self._waits:
            return False
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return False  # the write will say what is wrong
        return disk.f_bavail * disk.f_frsize < self._bytes + _BESIDE

    def begin(self, folder: Path, size: int) -> None:
        """A checkpoint of so many bytes is written into this folder, which need not be there."""
        self._bytes = size
        self._folder = next(one for one in (folder, *folder.parents) if one.is_dir())

    def refused(self, session: Any, step: int, error: BaseException) -> bool:
        """Whether the disk was full, which is told once until it has room."""
        if not is_full(error):
            return False
        if not self._waits:
            self._waits = True
            session.telemetry.event(
                _core.EVENT_CHECKPOINTS_WAIT,
                step,
                max(1, self._bytes),
                f"the disk is full: checkpoints of {_megabytes(self._bytes)} wait until it has room",
            )
            sys.stderr.write(
                f"evenstep: warning: checkpoints wait from step {step} on, for the disk of {self._folder} is full; training goes "
                f"on, and they are written again once it has {_megabytes(self._bytes + _BESIDE)} of room; earlier ones stay as "
                "they are\n"
            )
        return True

    def written(self, session: Any, step: int) -> None:
        """A checkpoint is whole."""
        if self._waits:
            self._waits = False
            session.telemetry.event(
                _core.EVENT_CHECKPOINTS_WAIT, step, 0, f"the disk has room: the checkpoint of step {step} is whole"
            )
            sys.stderr.write(f"evenstep: the disk has room again: the checkpoint of step {step} is whole\n")


def _megabytes(size: int) -> str:
    return f"{max(size, 10**5) / 1e6:.1f} MB"
