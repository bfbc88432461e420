"""What `evenstep bench balance` compares with: the best integer split at the speeds that the ranks have while all of them run.

A machine's speed comes and goes by more than policies differ, so these speeds are measured right before and right after each
turn that is judged by them, and each as long as half of a turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Lines = list[tuple[float, float]]  # (fixed seconds, seconds a sample) of each rank
# (samples of each rank, about how many seconds) -> each rank's mean seconds of such a step while all of them are at work
Measure = Callable[[Sequence[int], float], list[float]]
SIZES = 4  # of each rank, that its line goes through


@dataclass
class Moment:
    """The ranks' speeds at one time, the best split at these, and how long a step of it would take."""

    lines: Lines
    split: list[int]
    seconds: float


class Bound:
    """Alike on all ranks. A rank's line has its slope from several sizes, once; at each moment it is as high as the rank's share of
    the best split takes then. So what a moment's best split is hardly depends on the slope: it is next to what ran."""

    def __init__(self, measure: Measure, batch: int, seconds: float) -> None:
        """seconds: of a moment, which are to be many periods of a quota."""
        self._measure, self._batch, self._seconds = measure, batch, seconds
        self.lines: Lines = []
        self.split: list[int] = []  # that is measured at
        self.moments: list[Moment] = []
        self._levels: list[list[float]] = []  # of each moment: how many times each rank's line it was

    def learn(self, guess: Sequence[int]) -> None:
        """The lines, at sizes around the best split."""
        self.split, _ = best_split(self._lines(guess, 1), self._batch)
        self.lines = self._lines(self.split, 2)
        self.split, _ = best_split(self.lines, self._batch)

    def _lines(self, split: Sequence[int], passes: int) -> Lines:
        """Each rank's sizes forth and back, so that a machine whose speed moves makes no slope of it."""
        sizes = [sizes_around(share) for share in split]
        took: list[list[list[float]]] = [[[] for _ in range(SIZES)] for _ in split]
        for one in range(passes):
            for number in range(SIZES) if one % 2 == 0 else reversed(range(SIZES)):
                found = self._measure([of_rank[number] for of_rank in sizes], self._seconds * passes / SIZES)
                for rank, seconds in enumerate(found):
                    took[rank][number].append(seconds)
        return [line_through(of_rank, list(map(statistics.fmean, seconds))) for of_rank, seconds in zip(sizes, took)]

    def now(self) -> Moment:
        sizes = [max(1, share) for share in self.split]
        took = self._measure(sizes, self._seconds)
        levels = [second / seconds_of(line, size) for line, size, second in zip(self.lines, sizes, took)]
        lines = scaled(self.lines, levels)
        self._levels.append(levels)
        self.moments.append(Moment(lines, *best_split(lines, self._batch)))
        return self.moments[-1]

    def follow(self) -> None:
        """The split that was best in the median of all moments is measured at from now on."""
        levels = [statistics.median(of_rank) for of_rank in zip(*self._levels)]
        self.split, _ = best_split(scaled(self.lines, levels), self._batch)


def between(one: Moment, other: Moment) -> Moment:
    """Of what ran between the two."""
    lines = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in zip(one.lines, other.lines)]
    return Moment(lines, other.split, (one.seconds + other.seconds) / 2)


def scaled(lines: Sequence[tuple[float, float]], levels: Sequence[float]) -> Lines:
    return [(fixed * level, slope * level) for (fixed, slope), level in zip(lines, levels)]


def sizes_around(share: int) -> list[int]:
    """Different batch sizes, of each rank as many, as all meet before each."""
    sizes = {max(1, round(share * f)) for f in (0.6, 0.8, 1.0, 1.25)}
    while len(sizes) < SIZES:
        sizes.add(max(sizes) + 1)
    return sorted(sizes)


def line_through(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The least-squares line, neither its start nor its slope below zero."""
    size, second = statistics.fmean(sizes), statistics.fmean(seconds)
    spread = sum((b - size) ** 2 for b in sizes)
    slope = sum((b - size) * (t - second) for b, t in zip(sizes, seconds)) / spread if spread else second / size
    slope = min(max(slope, 0.0), second / size)
    return second - slope * size, slope


def seconds_of(line: tuple[float, float], samples: int) -> float:
    """A rank without samples runs a dummy one."""
    return line[0] + line[1] * max(1, samples)


def best_split(lines: Sequence[tuple[float, float]], batch: int) -> tuple[list[int], float]:
    """The best integer split, and its seconds."""
    from evenstep import _core

    tables = [[(size, seconds_of(line, size)) for size in (0, 1, 4 * batch)] for line in lines]
    return _core.balance(tables, batch)


def split_seconds(lines: Sequence[tuple[float, float]], split: Sequence[int]) -> float:
    return max(seconds_of(line, share) for line, share in zip(lines, split))
