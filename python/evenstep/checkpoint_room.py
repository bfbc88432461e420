"""Automatic checkpoints on a full disk: they wait until it has room, and training goes on. Whoever is told of it once knows
it: the terminal and the history say when they begin to wait, and when they are written again. No older checkpoint is removed
for room: the newest whole one is what a failure goes back to.

What is shared with the checkpoint before takes no room, and how much that is only the write finds out. So they wait for what
the last one really took, and one is tried whenever there is clearly more room than the last try found."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from evenstep import _core

# What a file system needs beside a checkpoint's own bytes: blocks that files do not fill, folders.
_BESIDE = 1 << 17
# Room has grown where it has by this part of what is needed: files of others come and go.
_MORE = 8


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
        self._needed = 0  # of these, those that are written
        self._found = 0  # the room there was at the last try
        self._settled = False  # whether that is known to be what others had left, too
        self._took: dict[str, int] = {}  # by a training's name: what its last one wrote
        self._folder = Path()
        self._waits = False

    def is_lacking(self) -> bool:
        """Whether the disk was found full, and has no room yet for what the checkpoint is thought to write, nor clearly more
        than at the last try."""
        if not self._waits:
            return False
        room = self._room()
        if room is None:
            return False  # the write will say what is wrong
        if not self._settled:  # it may have been filled while that was written, which has given back by now what it had
            self._settled, self._found = True, min(self._found, room)
        return room < self._needed + _BESIDE and room < self._found + max(_BESIDE, self._needed // _MORE)

    def _room(self) -> int | None:
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize

    def begin(self, session: Any, folder: Path, size: int, shares: bool) -> None:
        """A checkpoint of so many bytes is written into this folder, which need not be there. shares: with the one before."""
        self._bytes = size
        self._needed = min(size, self._took.get(session.name, size)) if shares else size
        self._folder = next(one for one in (folder, *folder.parents) if one.is_dir())
        self._settled, self._found = False, self._room() or 0

    def took(self, session: Any, size: int) -> None:
        """What a checkpoint, of the cadence or not, wrote of its bytes."""
        self._took[session.name] = size

    def refused(self, session: Any, step: int, error: BaseException) -> bool:
        """Whether the disk was full, which is told once until it has room."""
        if not is_full(error):
            return False
        if self._found >= self._needed + _BESIDE:  # more has changed than the last time
            self._needed = self._bytes
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
                f"on, and they are written again once it has {_megabytes(self._needed + _BESIDE)} of room; earlier ones stay as "
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
