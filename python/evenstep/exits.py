"""How a process ends: whether by an exception, and threads that end with it. A daemon thread that comes back from C++ when the
interpreter is already ending is unwound by it, which C++ answers with std::terminate: such threads are stopped before.

So are torch's own that call Gloo: one that has made a call says so first, and then drops what it was given with it, for which it
takes the interpreter's lock where the call was begun in backward (at::ThreadLocalState holds Python objects). A script whose last
step is done may end in between, and with it the process, by SIGABRT."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import weakref
from typing import Any, Protocol, TypeVar

from evenstep import _core
from evenstep.exits_older import unnamed_threads_rest

_PATIENCE_SECONDS = 1.0  # one that waits for a rank that never comes is left: it will not come back
_GLOO = "pt_gloo_runloop"  # torch's name for these threads
_GLOO_SECONDS = 10.0  # that one is ready to run; one that waits for another rank is not
_BUSY_SECONDS = 1.0  # that it runs: it does something else, or is a thread of the script's that was started there
_UNNAMED_SECONDS = 2.0  # the same, where they have no name: one that runs may be the script's own


class Stoppable(Protocol):
    def stop(self, seconds: float) -> None:
        """Ends the thread when it has done what it has; waits for that, but no longer than this. May come twice."""


_One = TypeVar("_One")
_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()
_lock = threading.Lock()  # of these
_ending = threading.Event()


def stop_at_exit(owner: Stoppable) -> None:
    """Stops the owner's thread when the interpreter ends, if it lives then. Keeps no owner alive. Any thread."""
    with _lock:
        _running.add(owner)


_left: weakref.WeakSet[Any] = weakref.WeakSet()


def _groups_of_torch() -> list[Any]:
    """The script's own among them."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return list(getattr(world, "pg_map", ()))


def _keep_all() -> None:
    for one in [*_left, *_groups_of_torch()]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def left_in_children(one: _One) -> _One:
    """The object, which processes forked from this one never take down: torch's Gloo would join threads that only the parent has,
    and abort where the child ends by sys.exit. So it is with all process groups that torch knows."""
    _left.add(one)
    return one


def is_ending() -> bool:
    """Whether the interpreter ends: a thread that looks now and then whether to go on waiting does not."""
    return _ending.is_set()


def ended_by_exception() -> bool:
    """At the process's exit: whether one ended the script (sys.exit is none)."""
    return any(getattr(sys, name, None) is not None for name in ("last_value", "last_exc"))


def _stop_all() -> None:
    _ending.set()
    stopped: list[Stoppable] = []
    while True:
        with _lock:
            left = [owner for owner in _running if owner not in stopped]
        if not left:
            break
        for owner in left:
            owner.stop(_PATIENCE_SECONDS)
        stopped += left
    _core.threads_rest(_GLOO, _GLOO_SECONDS, _BUSY_SECONDS)
    unnamed_threads_rest(_GLOO, _UNNAMED_SECONDS)


def stop_threads_at_exit() -> None:
    """Once, before anything else is registered to run then: what that does is done before."""
    atexit.register(_stop_all)
    os.register_at_fork(after_in_child=_keep_all)
