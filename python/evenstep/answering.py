"""Calls to another place that has to answer: none is waited for without end.

Drivers have time limits of their own, or none. What counts here is progress: bytes that came, or went. The call runs in a
thread that is left behind where nothing moves; there is no way to end it.
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
_LOOK_SECONDS = 0.5
FETCH = "EVENSTEP_FETCH_TIMEOUT"
UPLOAD = "EVENSTEP_UPLOAD_TIMEOUT"
_SECONDS = {FETCH: 120.0, UPLOAD: 600.0}


class Silent(EvenstepError):
    """The place did not answer."""

    ended: threading.Event | None = None
    """Set once the call that was left behind has ended after all."""


def limit(variable: str = FETCH) -> float:
    """For how long a place may be asked, and nothing come of it."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text or _SECONDS[variable])
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise EvenstepError(
            f"{variable}={text} is no time to wait for checkpoints\n  fix: give seconds, such as 300, or inf to wait for ever"
        )
    return seconds


def answer_of(
    call: Callable[[], Answer],
    silent: Callable[[float], Silent],
    moved: Callable[[], int] = lambda: 0,
    variable: str = FETCH,
    first: float = 0.0,
) -> Answer:
    """What the call returns or raises. `silent(seconds)` is raised once it has neither ended nor `moved()` changed for as
    many seconds as the variable says; until it changes first, for so many more."""
    seconds = limit(variable)
    ended = threading.Event()
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))
        ended.set()

    threading.Thread(target=run, name="evenstep-fetch", daemon=True).start()
    before, since = moved(), time.monotonic()
    while not ended.wait(min(_LOOK_SECONDS, seconds)):
        if before != (now := moved()):
            before, since, first = now, time.monotonic(), 0.0
        elif time.monotonic() - since >= seconds + first:
            error = silent(seconds + first)
            error.ended = ended
            raise error
    answer, failure = outcome[0]
    if failure is not None:
        raise failure
    return answer  # type: ignore[no-any-return]
