"""Threads that end with the process. A daemon thread that comes back from C++ when the interpreter is already ending is
unwound by it, which C++ answers with std::terminate: such threads are stopped before."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

_PATIENCE_SECONDS = 0.5  # one that waits for a rank that never comes is left: it will not come back


class Stoppable(Protocol):
    def stop(self, seconds: float) -> None:
        """Ends the thread when it has done what it has; waits for that, but no longer than this. May come twice."""


_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def stop_at_exit(owner: Stoppable) -> None:
    """Stops the owner's thread when the interpreter ends, if it lives then. Keeps no owner alive. Any thread."""
    _running.add(owner)


def _stop_all() -> None:
    for owner in list(_running):
        owner.stop(_PATIENCE_SECONDS)


atexit.register(_stop_all)
