"""NVTX ranges around the phases of a step (around collectives, the engine in C makes them itself), where somebody asks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
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


class Phases:
    """The phase of the step that is under way: data, forward, backward, communication, optimizer. Ranges that begin and end
    anywhere, so that those that a script pushes need not nest with them."""

    def __init__(self) -> None:
        open_ranges()
        self._range: Any = None

    def enter(self, name: str | None) -> None:
        """The phase before ends here; None: nothing that has a name begins."""
        if _start is None or _end is None:
            return
        if self._range is not None:
            _end(self._range)
        self._range = None if name is None else _start(name)
