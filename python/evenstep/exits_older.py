"""What torch 2.6 needs when a process ends: its threads that call Gloo have no name there by which they could be found."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LOOKS = 2  # as even_process_threads_rest has it
_LOOK_SECONDS = 0.001
_TASKS = Path("/proc/self/task")


def _name(thread: int) -> str:
    with suppress(OSError):
        return (_TASKS / str(thread) / "comm").read_text().rstrip("\n")
    return ""  # it has ended


def _runs(thread: int) -> bool:
    with suppress(OSError, IndexError):
        return (_TASKS / str(thread) / "stat").read_text().rpartition(")")[2].split()[0] in ("R", "D")
    return False


def _has_gloo() -> bool:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    return any("gloo" in str(backend) for backend, _ in getattr(world, "pg_map", {}).values())


def _unnamed() -> Iterator[int]:
    """Threads of C++ with the name that they were born with: the process's. One that waits for the GIL runs while a file is read."""
    mine = _name(os.getpid())
    python = {t.native_id for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    for path in _TASKS.iterdir():
        thread = int(path.name)
        if thread not in python and thread != os.getpid() and _name(thread) == mine:
            yield thread


def unnamed_threads_rest(name: str, seconds: float) -> bool:
    """Waits, where there is a group of Gloo's and no thread with the name that its threads have in later versions, until no thread of
    C++ without a name runs or is ready to; whether that was seen within so many seconds."""
    if not _has_gloo() or any(_name(int(path.name)) == name for path in _TASKS.iterdir()):
        return True
    until = time.monotonic() + seconds
    rested = 0
    while rested < _LOOKS:
        rested = 0 if any(map(_runs, _unnamed())) else rested + 1
        if rested == 0 and time.monotonic() >= until:
            return False
        time.sleep(_LOOK_SECONDS)  # without the GIL, which such a thread may wait for
    return True
