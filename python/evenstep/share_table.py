"""How workers that load batches ahead hear of their shares: a file without a name that they and the rank's process hold.

The rank's process keeps a lock on each batch's byte until it has said the shares, and a worker waits for that lock. The kernel
takes the locks of a process with it, whatever its end: nobody waits for a rank that is gone."""

from __future__ import annotations

import atexit
import fcntl
import os
import struct
import tempfile
import weakref
from multiprocessing import context, reduction
from typing import Any

_PLACES = 256  # batches; more than are shared out and not yet fetched


class Untold(Exception):
    """The shares of a batch will not be said: nobody wants it any more, or the rank's process has ended."""


class ShareTable:
    """Of one loader's workers. One process says the shares, any number wait for them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._record = struct.Struct(f"<Q{ranks}q")
        self._next = 0
        self._fd = _memory()
        os.ftruncate(self._fd, _PLACES * self._record.size)

    # -- the rank's process --

    def hold(self) -> None:
        """Before an iteration: who asks for a batch to come waits."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 0, self._next)

    def number(self) -> int:
        """Of the next batch that is drawn, in the loader's life."""
        self._next += 1
        return self._next - 1

    def say(self, number: int, shares: list[int]) -> None:
        os.pwrite(self._fd, self._record.pack(number + 1, *shares), self._place(number))
        self.leave(number)

    def leave(self, number: int) -> None:
        """Whoever waits for this batch goes on; where its shares were not said, without it."""
        if "_fd" in self.__dict__:  # as Python ends, tables may go before those who use them
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    # -- a worker --

    def wait(self, number: int) -> list[int]:
        """The shares of a batch, once they are said. Raises Untold."""
        fcntl.lockf(self._fd, fcntl.LOCK_SH, 1, number)
        try:
            found, *shares = self._record.unpack(os.pread(self._fd, self._record.size, self._place(number)))
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)
        if found != number + 1:
            raise Untold("the rank's process has ended, or wants other batches by now")
        return shares

    # -- both --

    def _place(self, number: int) -> int:
        return number % _PLACES * self._record.size

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked."""
        context.assert_spawning(self)
        return {"ranks": self.ranks, "_next": 0, "_fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._record = struct.Struct(f"<Q{self.ranks}q")
        self._fd = state["_fd"].detach()

    def __del__(self) -> None:
        fd = self.__dict__.pop("_fd", None)
        if isinstance(fd, int):
            os.close(fd)


def _memory() -> int:
    try:
        return os.memfd_create("evenstep-shares", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:  # its name is gone already
            return os.dup(file.fileno())


_waited_for: weakref.WeakSet[Any] = weakref.WeakSet()


def ends_with_script(waiting: Any) -> None:
    """waiting.close() is called as the script ends, and before torch, which was asked before, waits for its workers to end."""
    _waited_for.add(waiting)
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    for one in list(_waited_for):
        one.close()
