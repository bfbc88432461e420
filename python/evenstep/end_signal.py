"""With `evenstep run --notice`: SIGTERM that a scheduler sends to all processes of the job is notice to the agent, which has the
ranks save their state; it must not end them before."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from evenstep import _core
from evenstep._core import EvenstepError


def _has_notice() -> bool:
    return bool(os.environ.get("EVENSTEP_NOTICE")) and bool(os.environ.get("EVENSTEP_JOB"))


def hold_end_signal() -> None:
    """From now on SIGTERM ends this rank only where its agent sends it, or it does itself; a handler of the script's own stays."""
    _hold(False)


def _hold(always: bool) -> None:
    try:
        if _has_notice():
            _core.hold_end_signal(always)
    except EvenstepError:
        pass  # it ends then as ever


class _HeldWorker:
    """A DataLoader's worker_init_fn: torch's own handler ends workers whoever sends the signal."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        _hold(True)
        if self._function is not None:
            self._function(worker)


def held_in_workers(function: Callable[[int], Any] | None) -> Callable[[int], Any] | None:
    """A worker_init_fn after which SIGTERM ends a worker only where its rank sends it, if there is notice."""
    return _HeldWorker(function) if _has_notice() else function
