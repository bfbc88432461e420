"""What a micro-batch costs beyond its samples, by the times of whole ones and of the smaller last ones of the same steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

_SHOWN = 8  # smaller ones before they tell
_REMEMBERED = 32
_SMALLER = 0.75  # of a whole one: of a larger one time tells too little
_MOST = 8.0  # whole ones; a device that takes as long for any number
_NEAR = 0.25  # of a size: what was seen of one that differs by no more is true of the other, as while a cap is being learned
_NEWS = 0.05  # of a whole one: what differs by less from what was told is the same


class PieceTimes:
    """Of one rank. A step's whole micro-batches and its last one are compared with one another alone: how fast the rank is just
    now makes no difference."""

    def __init__(self) -> None:
        self._size = 0
        self._flatness: deque[float] = deque(maxlen=_REMEMBERED)  # part of a whole one's time that a sample takes
        self.more_samples = 0.0  # each costs as much as so many samples more than its own; 0 while that is not known

    @property
    def told(self) -> tuple[int, float]:
        """For the vote: (samples of a whole one, more_samples)."""
        return self._size, self.more_samples

    def take(self, size: int, pieces: Sequence[tuple[int, float]]) -> None:
        """One step's: (samples, seconds). size: of a whole one."""
        if size != self._size:
            self._resize(size)
        whole = [seconds for samples, seconds in pieces if samples == size]
        last, seconds = pieces[-1]
        if not whole or last > _SMALLER * size or not statistics.median(whole) > 0:
            return
        self._flatness.append((1 - seconds / statistics.median(whole)) / (size - last))
        if len(self._flatness) >= _SHOWN:
            self._learn(size)

    def _resize(self, size: int) -> None:
        before, self._size = self._size, size
        if abs(size - before) > _NEAR * before:
            self.more_samples = 0.0
            self._flatness.clear()
            return
        for index, each in enumerate(self._flatness):
            if each > 0:  # else it took as long for any number, as of this size
                self._flatness[index] = 1 / max(1.0, 1 / each + size - before)

    def _learn(self, size: int) -> None:
        each = statistics.median(self._flatness)
        # a whole one takes as long as size + more samples: 1 / each of them
        more = 1 / each - size if each * (1 + _MOST) * size > 1 else _MOST * size
        if abs(more - self.more_samples) > _NEWS * size:
            self.more_samples = max(0.0, more)
