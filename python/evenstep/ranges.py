"""The phases of a step: told to the agent, which knows from them who hangs, and in what; and as NVTX ranges (around
collectives, the engine in C makes them itself), where somebody asks."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenstep import _core

_start: Callable[[str], Any] | None = None
_end: Callable[[Any], Any] | None = None
_opened = False


def open_ranges() -> None:
    """Once a process: EVENSTEP_NVTX=1 asks for ranges, and so does a profiler that has set NVTX's injection (Nsight Systems)."""
    global _opened, _start, _end
    if _opened:
        return
    _opened = True
    asked = os.environ.get("EVENSTEP_NVTX", "")
    if asked in ("", "0") and (asked == "0" or not os.environ.get("NVTX_INJECTION64_PATH")):
        return
    try:
        _core.ranges_open(os.environ.get("EVENSTEP_NVTX_LIBRARY") or None)
        _start, _end = _core.range_start, _core.range_end
    except _core.EvenstepError as error:
        _start, _end = _of_torch()
        if _start is None and asked:
            warnings.warn(f"EVENSTEP_NVTX is set, but {error}", stacklevel=2)


def _of_torch() -> tuple[Callable[[str], Any] | None, Callable[[Any], Any] | None]:
    """torch has NVTX in itself where it was built with CUDA: enough for phases, not for the engine's threads."""
    try:
        import torch
    except ImportError:
        return None, None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None, None
    return torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end


_ACTIVITIES = {
    None: _core.AT_SCRIPT,
    "data": _core.AT_DATA,
    "forward": _core.AT_FORWARD,
    "backward": _core.AT_BACKWARD,
    "communication": _core.AT_COLLECTIVE,
    "optimizer": _core.AT_OPTIMIZER,
}


class Phases:
    """The phase of the step that is under way: data, forward, backward, communication, optimizer. Ranges that begin and end
    anywhere, so that those that a script pushes need not nest with them."""

    def __init__(self, telemetry: _core.Telemetry) -> None:
        open_ranges()
        self._range: Any = None
        self._tell = telemetry.enter
        self._activity = _core.AT_SCRIPT

    def enter(self, name: str | None) -> None:
        """The phase before ends here; None: nothing that has a name begins."""
        self._activity = _ACTIVITIES[name]
        self._tell(self._activity)
        if not _watching and name == "forward":
            _watch_compiler(self)
        if _start is None or _end is None:
            return
        if self._range is not None:
            _end(self._range)
        self._range = None if name is None else _start(name)

    @contextmanager
    def during(self, activity: int) -> Iterator[None]:
        """Inside, the rank is at that; after it, at what it was at before."""
        before, self._activity = self._activity, activity
        self._tell(activity)
        try:
            yield
        finally:
            self._activity = before
            self._tell(before)

    def goes_on(self) -> None:
        """Within what the rank is at, one more piece of it is done."""
        self._tell(self._activity)


_watching = False
_compiling: list[Any] = []  # what is entered while torch.compile is at work


def _watch_compiler(phases: Phases) -> None:
    """Has torch.compile tell when it begins and ends, once it is there: those take minutes, and say nothing of later
    steps."""
    global _watching
    dynamo = sys.modules.get("torch._dynamo.callback")
    handler = getattr(dynamo, "callback_handler", None)
    if handler is None:
        return
    _watching = True

    def begins(*_: Any) -> None:
        _compiling.append(entered := phases.during(_core.AT_COMPILE))
        entered.__enter__()

    def ends(*_: Any) -> None:
        if _compiling:
            _compiling.pop().__exit__(None, None, None)

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
