"""How data of accelerators cross the host: down on one thread, up on another, each way in the order in which they were handed
on, so that one is on its way down while another is summed and a third comes up."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from evenstep.exits import stop_at_exit

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (where to, from where)

_Job = Callable[[], None]


class Waiter:
    """A thread that does one job after the other: each waits for something. The first error ends all that follow."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Job, _Job | None] | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        stop_at_exit(self)

    @property
    def error(self) -> BaseException | None:
        """Of what was done so far."""
        return self._error

    def submit(self, job: _Job, after_error: _Job | None = None) -> None:
        """after_error: what is done in its place where one before it has failed."""
        self._jobs.put((job, after_error))

    def join(self) -> None:
        """Waits for the jobs submitted so far; raises their error."""
        done = threading.Event()
        self._jobs.put(done)
        done.wait()
        self.check()

    def check(self) -> None:
        """Raises the error of what was done so far."""
        error = self._error
        if error is not None:
            raise error

    def stop(self, seconds: float = 0) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=seconds)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if isinstance(job, threading.Event):
                job.set()
                continue
            do = job[0] if self._error is None else job[1]
            try:
                if do is not None:
                    do()
            except BaseException as error:
                self._error = self._error or error
            del job, do  # nothing is kept alive while the thread waits


def cut(flat: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Each begins at a multiple of 64 elements; the last ones may be empty."""
    count = flat.numel() if parts == 1 else -(-flat.numel() // (64 * parts)) * 64
    return [flat[part * count : (part + 1) * count] for part in range(parts)]


@dataclass(frozen=True)
class Trip:
    """A way through the host, of what this rank brings there."""

    down: Copies
    up: Copies
    landed: Callable[[], None]  # its sum may be formed
    summed: Callable[[], None]  # returns when it is there


class Stage(Protocol):
    """How copies between a device and the host are made; see `evenstep.hybrid_engine`."""

    def enter(self) -> None: ...

    def land(self, copies: Copies, mark: Any, works: Sequence[Any]) -> None: ...

    def rise(self, copies: Copies) -> None: ...


class Meeting(Protocol):
    """A group of ours, as far as it is asked for here."""

    @property
    def closed(self) -> bool: ...

    def barrier(self) -> None: ...

    def revoke(self) -> None: ...


class Crossing:
    """`meeting`: where ranks that spread sums among themselves hear that these are there, so that no device waits for them in a
    call."""

    def __init__(self, stage: Stage, meeting: Meeting | None, name: str) -> None:
        self._stage, self._meeting = stage, meeting
        self.down, self.up = Waiter(name), Waiter(f"{name}-up")
        for waiter in (self.down, self.up):
            weakref.finalize(self, waiter.stop)

    def carry(
        self,
        trip: Trip | None,
        mark: Any,
        works: Sequence[Any],
        spread: Callable[[], None],
        given_up: Callable[[BaseException | None], None],
    ) -> None:
        """`trip`: None where another rank brings it. It goes down behind the mark and the works; `spread` is called on the thread that
        brings up, when it has come up and all who meet are there; `given_up`, with the error, where this or one before it
        failed."""
        stage = self._stage

        def go_down(trip: Trip) -> None:
            stage.enter()
            with torch.no_grad():
                stage.land(trip.down, mark, works)
            trip.landed()

        def come_up() -> None:
            stage.enter()
            with torch.no_grad():
                self._come_up(trip, works, given_up)
                spread()

        if trip is not None:
            self.down.submit(partial(go_down, trip))
        self.up.submit(come_up, lambda: given_up(self.up.error))

    def _come_up(
        self, trip: Trip | None, works: Sequence[Any], given_up: Callable[[BaseException | None], None]
    ) -> None:
        try:
            if trip is not None:
                trip.summed()
            if self._meeting is not None:
                self._meeting.barrier()
            for work in works:  # they read what is written now
                work.wait()
            if trip is not None:
                self._stage.rise(trip.up)
        except BaseException as error:
            if self._meeting is not None and not self._meeting.closed:
                self._meeting.revoke()  # the others wait there for what does not come
            given_up(error)
            raise

    def stop(self, seconds: float = 1.0) -> None:
        for waiter in (self.down, self.up):
            waiter.stop(seconds)
