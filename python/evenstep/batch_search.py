"""Which sizes es.find_batch_size tries, one after the other, and what it makes of them. Knows nothing of devices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from evenstep._core import memory_bytes, memory_cap

_FINENESS = 32  # the search ends where a larger size would be larger by less than this part
_EQUALLY_FAST = 0.98


@dataclass(frozen=True)
class Trial:
    """A size that was tried."""

    samples: int
    predicted_bytes: int | None  # before it ran; None: too little was measured until then
    peak_bytes: int | None  # None: memory ran out
    seconds: float  # of a step, the median; nan: memory ran out
    fits: bool  # with the margin

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else math.nan


class Runs(Protocol):
    """Trial steps on a device."""

    @property
    def least(self) -> int:
        """The smallest size that can be trained."""

    @property
    def floor_bytes(self) -> int:
        """What is held between two steps."""

    @property
    def extra_bytes(self) -> int:
        """What of it is there for the trials alone."""

    def run(self, samples: int, limit_bytes: int) -> tuple[int | None, float]:
        """(peak of the memory, extra bytes included, or None where it ran out; seconds of a step)"""


@dataclass(frozen=True)
class Limits:
    memory_bytes: int
    margin: float  # the part of it that is to stay free
    most: int | None
    seconds: float


@dataclass(frozen=True)
class Found:
    largest: int
    fastest: int
    room_for: int | None
    stopped_by: str
    trials: tuple[Trial, ...]


def search(runs: Runs, limits: Limits, clock: Callable[[], float] = time.monotonic) -> Found:
    return _Search(runs, limits, clock).run()


class _Search:
    def __init__(self, runs: Runs, limits: Limits, clock: Callable[[], float]) -> None:
        self._runs, self._limits, self._clock = runs, limits, clock
        self._usable = limits.memory_bytes * (1 - limits.margin)
        self._trials: dict[int, Trial] = {}
        self._peaks: list[tuple[int, float]] = []
        self._began = clock()
        self._last = 0.0  # seconds that the last trial took
        self._stopped_by = ""

    def run(self) -> Found:
        size = self._first()
        self._try(size)
        if not self._trials[size].fits and size > self._runs.least:
            self._try(self._runs.least)
        while (size := self._larger()) > 0:
            self._try(size)
        for size in self._around_the_fastest():
            self._try(size)
        return Found(
            self._largest,
            self._fastest(),
            self._room(),
            self._stopped_by,
            tuple(t for _, t in sorted(self._trials.items())),
        )

    def _first(self) -> int:
        size = max(2, self._runs.least)
        return size if self._limits.most is None else min(size, self._limits.most)

    def _try(self, size: int) -> None:
        began = self._clock()
        predicted = self._predicted(size)
        peak, seconds = self._runs.run(size, self._limits.memory_bytes)
        self._last = self._clock() - began
        if peak is not None:
            self._peaks.append((size, float(max(1, peak - self._runs.floor_bytes))))
        extra = self._runs.extra_bytes
        own = None if peak is None else peak - extra
        fits = own is not None and own <= self._usable
        self._trials[size] = Trial(size, None if predicted is None else predicted - extra, own, seconds, fits)

    def _predicted(self, size: int) -> int | None:
        if len(self._peaks) < 2:  # of one size alone nobody knows what is the same for all sizes
            return None
        return self._runs.floor_bytes + round(memory_bytes(self._peaks, size))

    @property
    def _largest(self) -> int:
        return max((size for size, trial in self._trials.items() if trial.fits), default=0)

    def _larger(self) -> int:
        """The next size to try; 0: the search has ended."""
        largest, most = self._largest, self._limits.most
        too_large = min((size for size, trial in self._trials.items() if not trial.fits), default=None)
        size, by = 2 * largest, "memory"
        if len(self._peaks) > 1:
            cap = memory_cap(self._peaks, self._usable - self._runs.floor_bytes)
            size = size if cap is None else min(size, cap)
        if too_large is not None:
            size = min(size, (largest + too_large) // 2)
        if most is not None and most <= size:
            size, by = most, "most"
        fine = (size - largest) * _FINENESS < largest and by == "memory"
        if size <= largest or fine:
            self._stopped_by = by
            return 0
        if not self._in_time(size, largest):
            self._stopped_by = "seconds"
            return 0
        return size

    def _in_time(self, size: int, last: int) -> bool:
        """Time grows with the size, at the most; a smaller one takes no longer than the last one."""
        expected = self._last * max(1.0, size / max(1, last))
        return self._clock() - self._began + expected <= self._limits.seconds

    def _around_the_fastest(self) -> list[int]:
        """Between doublings may lie a faster one."""
        fitting = [trial for trial in self._trials.values() if trial.fits]
        if not fitting:
            return []
        best = max(fitting, key=lambda trial: trial.samples_per_second).samples
        between = [size for size in (best * 3 // 4, best * 3 // 2) if self._runs.least <= size <= self._largest]
        return [size for size in between if size not in self._trials and self._in_time(size, self._largest)]

    def _fastest(self) -> int:
        fitting = [trial for trial in self._trials.values() if trial.fits]
        most = max((trial.samples_per_second for trial in fitting), default=0.0)
        return min((t.samples for t in fitting if t.samples_per_second >= _EQUALLY_FAST * most), default=0)

    def _room(self) -> int | None:
        if len(self._peaks) < 2:
            return None
        return memory_cap(self._peaks, self._usable + self._runs.extra_bytes - self._runs.floor_bytes)
