"""Threads of Python's that wait for the call of another one: what python/ext/callers.c reads where it is asked, by a rank that
waits in a collective, which threads may make one, before it is said that ranks wait for one another for good."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from evenstep import _core

_first = threading.main_thread().ident
_waiting: dict[int, Callable[[], bool]] = {}
"""Threads that wait for the call of another one, and whether it is over for them: nothing written in Python, which may not
run in the middle of a call."""


def _begin_again() -> None:
    global _first
    _first = threading.main_thread().ident
    _waiting.clear()


os.register_at_fork(after_in_child=_begin_again)


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
