"""Calls to another place that has to answer: none is waited for without end.

Drivers have time limits of their own, or none. What counts here is progress: bytes that came. The call runs in a thread that
is left behind where nothing comes; there is no way to end it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from evenstep._core import EvenstepError

Answer = TypeVar("Answer")
_SECONDS = 120.0
_LOOK_SECONDS = 0.5


class Silent(EvenstepError):
    """The place did not answer."""


def limit() -> float:
    """For how long a place may be asked, and nothing come of it."""
    text = os.environ.get("EVENSTEP_FETCH_TIMEOUT", "")
    try:
        seconds = float(text or _SECONDS)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise EvenstepError(
            f"EVENSTEP_FETCH_TIMEOUT={text} is no time to wait for checkpoints\n  fix: give seconds, such as 300, or inf to wait for ever"
        )
    return seconds


def answer_of(
    call: Callable[[], Answer],
    silent: Callable[[float], EvenstepError],
    arrived: Callable[[], int] = lambda: 0,
) -> Answer:
    """What the call returns or raises. `silent(seconds)` is raised once it has neither ended nor `arrived()` changed for
    EVENSTEP_FETCH_TIMEOUT seconds."""
    seconds = limit()
    ended = threading.Event()
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))
        ended.set()

    threading.Thread(target=run, name="evenstep-fetch", daemon=True).start()
    here, since = arrived(), time.monotonic()
    while not ended.wait(min(_LOOK_SECONDS, seconds)):
        if here != (now := arrived()):
            here, since = now, time.monotonic()
        elif time.monotonic() - since >= seconds:
            raise silent(seconds)
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
