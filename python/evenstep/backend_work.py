"""The Works that torch waits on, and the thread on which asynchronous collectives run."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from evenstep import _core, callers, reducer_waits
from evenstep.backend_futures import for_cpp, is_python
from evenstep.errors import error_of
from evenstep.exits import stop_at_exit
from evenstep.sites import Place, make_for, of_caller


def completed(result: Any) -> dist.Work:
    """A Work that is complete, with `result` as its future's value."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _too_late(seconds: float) -> _core.EvenstepError:
    fix = "wait for it again, or see what the other ranks are doing (a stack dump)"
    words = f"Timed out: a collective was not done after the {seconds:.3g} s of this wait; it goes on"
    return error_of("EVEN_ERR_TIMEOUT", words, fix)


def absent(ranks: list[int], seconds: float) -> _core.EvenstepError:
    """What a barrier fails with that knows all who did not come."""
    fix = f"see what ranks {ranks} are doing (a stack dump), or raise the timeout"
    words = f"Timed out: ranks {ranks} did not come to monitored_barrier within {seconds:.3g} s"
    return error_of("EVEN_ERR_TIMEOUT", words, fix, ranks[0])


class LaterWork(dist.Work):
    """A Work that completes later. Python waits on the future itself and sees the error as it was raised; C++ gets one
    whose error is its own, since an exception that Python sets in a future is a value like any other to C++."""

    is_for_cpp = False  # whether C++ alone has it

    def __init__(self, future: Future[Any], result: Any, call: Submitted | None = None) -> None:
        super().__init__()
        self._future = future
        self._call = call  # that another thread makes
        self._written = result
        self._for_cpp = future.then(lambda done: done.value())

    def keep_record(self, record: Any) -> None:
        """Before anybody else has the Work: the profiler's record ends with the call, and who waits goes on after that."""
        self._for_cpp = record._call_end_callbacks_on_future(self._for_cpp)

    def _ends_within(self, seconds: float) -> bool:
        ended = threading.Event()
        self._for_cpp.add_done_callback(lambda _: ended.set())
        return ended.wait(seconds)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the call is done. With a limit (torch says 0 where there is none) the wait may end before: the
        call then goes on, as in Gloo."""
        limit = 0.0 if timeout is None else timeout.total_seconds()
        if limit > 0 and not self._ends_within(limit):
            raise _too_late(limit)
        done = functools.partial(torch._C.Future.done, self._for_cpp)  # not torch.futures.Future's, which is Python
        waits = contextlib.nullcontext() if done() else callers.waiting_for(done)
        with waits, contextlib.suppress(Exception):  # the same error as the one that comes now, in C++'s words
            self._for_cpp.wait()  # it completes a moment later, and may be asked at once
        self._future.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        if not self.is_for_cpp and is_python(sys._getframe().f_back, "get_future"):
            return self._for_cpp
        if self._call is not None:
            reducer_waits.made_by_cpp(self._call)
        return for_cpp(self._for_cpp, self._written)

    def is_completed(self) -> bool:
        return self._for_cpp.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the call failed with; None where it did not, or goes on."""
        if self.is_completed():
            try:
                self._future.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> Any:
        return self._future.wait()


def finished(result: Any) -> LaterWork:
    """As `completed`, for C++ that may ask for a list of tensors."""
    future: Future[Any] = Future()
    future.set_result(result)
    return LaterWork(future, result)


class Submitted:
    """A call that the thread makes: a job, or one that its queue has made itself."""

    __slots__ = ("ended", "future", "job", "of_backward", "place", "result")

    def __init__(self, job: Callable[[], None] | None, future: Future[Any], result: Any, place: Place | None) -> None:
        self.job, self.future, self.result, self.place = job, future, result, place
        self.ended = False
        self.of_backward: Any = None  # of reducer_waits.py

    def make(self) -> None:
        job, self.job = self.job, None  # it has the call's tensors, and who keeps the Work keeps this
        assert job is not None
        make_for(self.place)
        try:
            job()
        except Exception as error:
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        self.ended = True
        if self.of_backward is not None:
            self.of_backward.end(self, failed=error is not None)
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.result)


class Worker:
    """Runs a group's asynchronous calls, in their order, on one thread: all-reduces of plain memory without the GIL from
    when they are asked for to when they have ended."""

    def __init__(self, name: str = "evenstep-collectives", row: int | None = _core.ROW_LATER) -> None:
        """`row`: the thread's in a timeline; None: one of its own, if it needs any."""
        self._row = row
        self._jobs = _core.CallQueue()
        self._last: weakref.ref[Future[Any]] | None = (
            None  # it has the tensors, and is there while its call is under way
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        stop_at_exit(self)

    def _work(self) -> None:
        if self._row is not None:
            _core.telemetry_row(self._row)
        with torch.no_grad():
            while True:
                call, error = self._jobs.next()
                if call is None:
                    return
                if call.job is not None:
                    call.make()
                else:
                    call.end(error)
                del call, error  # nothing is kept alive while the thread waits

    def is_mine(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.get_ident() == self._thread.ident

    def submit(self, job: Callable[[], None], result: Any) -> dist.Work:
        future: Future[Any] = Future()
        call = Submitted(job, future, result, of_caller())
        if self.is_mine():
            # A callback of a call that has just ended (torch runs them here), which may wait for this one: nobody else
            # would do it. It comes before those that were submitted meanwhile, on every rank.
            call.make()
            return LaterWork(future, result)
        self._last = weakref.ref(future)
        self._jobs.put(call)
        return LaterWork(future, result, call)

    def submit_all_reduce(self, reducer: _core.Reducer, tensors: Any, options: Any) -> dist.Work | None:
        """None where the reducer does not know a call of this kind. For other threads than this."""
        future: Future[Any] = Future()
        place = of_caller()
        call = Submitted(None, future, tensors, place)
        if not reducer.put(self._jobs, call, place, tensors, options):
            return None
        self._last = weakref.ref(future)
        return LaterWork(future, tensors, call)

    def alive(self) -> bool:
        """Whether its thread is there: not in a process that was forked from the one that made it."""
        return self._thread.is_alive()

    def _last_call(self) -> Future[Any] | None:
        """Of the calls submitted so far, where it may be under way."""
        return None if self._last is None else self._last()

    def idle(self) -> bool:
        """Whether all calls submitted so far are done."""
        last = self._last_call()
        return last is None or last.done()

    def settle(self) -> None:
        """Waits for the calls submitted so far; their errors belong to their own Works. In a callback on the thread itself
        nothing is under way, and in a child that was forked nobody makes them."""
        if self.is_mine() or not self.alive():
            return
        last = self._last_call()
        if last is not None:
            with contextlib.suppress(Exception):
                last.wait()
        self._last = None

    def stop(self, seconds: float = 10) -> None:
        if self.alive():  # a forked child may have no more than the queue, with its lock held
            self._jobs.put(None)
            if not self.is_mine():
                self._thread.join(timeout=seconds)
