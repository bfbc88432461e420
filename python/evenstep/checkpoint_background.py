"""Checkpoints that are written while training goes on: copied to memory first, at most one at a time.

The memory is kept for the next one, so that a copy takes no page faults. Under `evenstep run` it is a memory file that the
agent holds, too: what a rank has taken and does not live to write, the agent writes. The thread is a daemon that is always
there: who ends the process joins the write (evenstep.checkpoint)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from evenstep import _core
from evenstep.checkpoint_files import File, file_of, owner
from evenstep.checkpoint_snapshot import Snapshot
from evenstep.exits import is_ending
from evenstep.memory import HostMemory

# Training comes first where cores are scarce: twice the share of the writer's.
_NICE = 4

Saved = tuple[int, int, int]  # bytes of a checkpoint's files; of these linked, and shared chunk by chunk


def saved_words(folder: Path, saved: Saved) -> str:
    """What the event of a checkpoint says."""
    total, linked, shared = saved
    if not linked and not shared:
        return folder.name
    return f"{folder.name}: of {total / 2**20:.1f} MiB {linked / 2**20:.1f} linked, {shared / 2**20:.1f} shared"


class Background:
    """The write that goes on while training does."""

    def __init__(self) -> None:
        self._own_threads()
        self._error: BaseException | None = None
        self._memory: _core.CheckpointSnapshot | None = None
        self._bytes = 0  # that the memory has
        self.saved: Saved = (0, 0, 0)  # of the last write
        self._process = 0

    def _own_threads(self) -> None:
        """A fork has none of its parent's."""
        self._owner = os.getpid()
        self._thread: threading.Thread | None = None
        self._asked = threading.Lock()  # free: there is a write to do
        self._asked.acquire()
        self._idle = threading.Lock()  # free: there is none
        self._call: Callable[[], None] | None = None
        self._prepared = False  # there is one to do, which was not asked for yet

    def take(self, folder: Path, snapshot: Snapshot, replace: bool, previous: Path | None = None) -> bool:
        """Copies it. False: the memory that is free does not hold another copy. The last write must have ended."""
        size = snapshot.size + len(snapshot.text)
        if not self._has_room(size):
            return False
        if self._memory is None or self._process != os.getpid():  # a fork's memory is its parent's
            self._memory = _core.CheckpointSnapshot(_descriptor(first=self._process == 0))
            self._process = os.getpid()
        files: list[File] = [
            file_of(name, tensors, snapshot.metadata.get(name, ())) for name, tensors in snapshot.files.items()
        ]
        files += [(name, content, [], None) for name, content in snapshot.tables.items()]
        self._memory.take(folder, files, snapshot.text, replace, size, previous, *owner())
        self._bytes = max(self._bytes, size)
        return True

    def _has_room(self, size: int) -> bool:
        if size <= self._bytes:
            return True
        memory = HostMemory()
        use = memory.read()
        return size - self._bytes + memory.reserve * use.limit < use.available

    def start(self, after: Callable[[], None], failed: Callable[[BaseException], bool]) -> None:
        """Writes what was taken, then calls `after`. failed: told of an error, says whether that is all; else `join`
        gives it."""
        self.prepare(after, failed)
        self.begin()

    def prepare(self, after: Callable[[], None], failed: Callable[[BaseException], bool]) -> None:
        """The same, once `begin` is called: who still has something to do at once is not to share the core with the writer."""

        def run() -> None:
            try:
                self.write()
                after()
            except BaseException as error:
                if not failed(error):
                    self._error = error
                self._raise_own(error)

        self.begin_thread()
        self._idle.acquire()
        self._call = run
        self._prepared = True

    def begin(self) -> None:
        if self._prepared and self._owner == os.getpid():
            self._prepared = False
            if self._thread is None:
                self._make()
            else:
                self._asked.release()

    def begin_thread(self) -> None:
        """Begins the thread that writes, if there is none yet: best while there is memory. One that gets none before it
        begins is waited for by Python's Thread.start for ever. Once the script has ended, Python 3.12 begins none, nor need a
        later one: who asks then writes."""
        if self._owner != os.getpid():
            self._own_threads()
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="evenstep-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if threading.main_thread().is_alive() and not is_ending():
                    raise  # there is no room for one
                return
            self._thread = thread

    def _serve(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _NICE)  # of this thread
        while True:
            self._asked.acquire()
            self._make()

    def _make(self) -> None:
        try:
            assert self._call is not None
            self._call()
        except BaseException as error:
            self._error = error
            self._raise_own(error)
        finally:
            self._call = None
            self._idle.release()

    def _raise_own(self, error: BaseException) -> None:
        """What is no Exception (Ctrl-C) is the script's, where it is its thread that writes."""
        if self._thread is None and not isinstance(error, Exception):
            self._error = None
            raise error

    def write(self) -> None:
        assert self._memory is not None
        self.saved = self._memory.write()

    @property
    def busy(self) -> bool:
        return self._owner == os.getpid() and self._idle.locked()

    def join(self) -> BaseException | None:
        """Waits for the write; gives its error once."""
        self.begin()
        if self._owner == os.getpid():
            with self._idle:
                pass
        error, self._error = self._error, None
        return error


def _descriptor(first: bool) -> int:
    """Of the agent's memory file, for the process that it started and none below; -1: none."""
    text = os.environ.get("EVENSTEP_SNAPSHOT_FD", "")
    return int(text) if first and text.isdigit() and sys.platform == "linux" else -1
