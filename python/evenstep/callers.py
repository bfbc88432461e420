"""Which threads of Python's may make a collective: asked, seldom, by a rank that waits in one, before it is said that ranks
wait for one another for good. Threads that have made one are known to the engine; this is about all others."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from evenstep import _core

_WAITS = ("threading", "queue", "selectors", "_weakrefset")
"""Where a thread is while it waits: what it is goes by who called that."""

_NEVER_CALL = {
    ("concurrent.futures.thread", "_worker"),  # idle: what it works at is called from there
    ("evenstep.backend_work", "_work"),  # the engine knows whether it is idle
    ("multiprocessing.queues", "_feed"),
    ("torch.utils.data._utils.pin_memory", "_pin_memory_loop"),
    ("torch.utils.data._utils.pin_memory", "do_one_step"),
    ("tqdm._monitor", "run"),
}


def _never_calls(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") in _WAITS:
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _NEVER_CALL


_waiting: dict[int, Callable[[], bool]] = {}
"""Threads that wait for the call of another one, and whether it is over for them."""


@contextlib.contextmanager
def waiting_for(done: Callable[[], bool]) -> Iterator[None]:
    """This thread waits, without a limit, until a thread that makes calls for others has made one: then `done()`."""
    thread = threading.get_ident()
    _waiting[thread] = done
    _core.comm_rest(True)
    try:
        yield
    finally:
        _core.comm_rest(False)
        _waiting.pop(thread, None)


def others_may_call() -> bool:
    """Whether any thread but this one and the first may, or one that waits for another's call; of one that nothing is
    known of: yes."""
    if any(done() for done in list(_waiting.values())):
        return True
    known = {threading.get_ident(), threading.main_thread().ident, *_waiting}
    return any(thread not in known and not _never_calls(frame) for thread, frame in sys._current_frames().items())
