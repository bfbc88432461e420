"""The end of a backward in which C++ makes calls, as DDP's reducer does, and waits for them: who waits there makes no call itself.

Autograd runs its final callbacks in their order once it has called all hooks, and nothing else of this backward comes after them. Ours
is asked for with the first such call, so before the reducer's, which waits.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable, graph

from evenstep import _core

if TYPE_CHECKING:
    from evenstep.backend_work import Submitted

_RUNS: CodeType = graph._engine_run_backward.__code__


class _OfThread(threading.local):
    calls: _Calls | None = None
    nested = (
        False  # a backward inside one had such calls: at the end of the outer one, who waits for which is not known
    )


_own = _OfThread()


class _Calls:
    """Of one backward that are under way."""

    def __init__(self, task: int) -> None:
        self.task = task
        self._under_way: set[Submitted] = set()
        self._failed = self._awaited = False

    def add(self, call: Submitted) -> None:
        call.of_backward = self
        self._under_way.add(call)
        if call.ended:
            self._under_way.discard(call)

    def end(self, call: Submitted, failed: bool) -> None:
        """Before those who wait for it go on. Any thread."""
        self._under_way.discard(call)
        self._failed = self._failed or failed
        if self._awaited and self._is_over:
            _core.comm_backward_over()

    @property
    def _is_over(self) -> bool:
        """Whether who waits for them goes on."""
        return self._failed or not self._under_way

    def backward_has_run(self) -> None:
        caller = sys._getframe().f_back
        if caller is None or caller.f_code is not _RUNS:  # a thread of autograd's own, or not as we know it
            return
        nested, _own.nested = _own.nested, _is_inside(caller)
        if nested or _own.nested:
            return
        self._awaited = True
        _core.comm_waits_in_backward(caller)
        if self._is_over:
            _core.comm_backward_over()


def _is_inside(caller: FrameType) -> bool:
    frame = caller.f_back
    while frame is not None and frame.f_code is not _RUNS:
        frame = frame.f_back
    return frame is not None


def made_by_cpp(call: Submitted) -> None:
    """C++ alone will wait for it."""
    task = torch._C._current_graph_task_id()
    if task == -1:
        return
    calls = _own.calls
    if calls is None or calls.task != task:
        calls = _own.calls = _Calls(task)
        Variable._execution_engine.queue_callback(calls.backward_has_run)
    calls.add(call)
