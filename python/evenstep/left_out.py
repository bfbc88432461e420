"""Ranks that have no samples because a step with one of theirs would take longer: who, what it gains, when they return."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evenstep._core import Balancer

_SURE = 8  # steps in a row: not a trial, nor the one sample that a rank gets now and then to be looked at
_LATE = 1.05  # a rank whose empty steps take so much longer than the others' work still holds them up


class LeftOut:
    """Of one balancer's ranks; the same on all."""

    def __init__(self, ranks: int, batch: int) -> None:
        self._batch = batch
        self._without = [0] * ranks  # steps in a row without samples; below 0: with some
        self._out: dict[int, str] = {}  # rank -> in words

    def take(
        self, balancer: Balancer, timings: Sequence[tuple[int, float]], caps: Sequence[int | None]
    ) -> tuple[int, str] | None:
        """After a step. Where that is news: how many ranks have no samples now, and in words."""
        if sum(samples for samples, _ in timings) != self._batch:
            return None
        back = None
        for rank, (samples, _) in enumerate(timings):
            before = self._without[rank]
            now = self._without[rank] = max(1, before + 1) if samples == 0 else min(-1, before - 1)
            if now == -_SURE and rank in self._out:
                del self._out[rank]
                back = rank
        sure = (rank for rank, steps in enumerate(self._without) if steps == _SURE)
        new = [rank for rank in sure if caps[rank] != 0 and rank not in self._out]
        for rank in new:
            words = _why(balancer, rank, [samples for samples, _ in timings])
            if words:
                self._out[rank] = words
        told = next((rank for rank in new if rank in self._out), None)
        if told is None and back is None:
            return None
        more = len(self._out) - 1
        if told is None and self._out:
            told = next(iter(self._out))
        if told is None:
            return 0, f"rank {back} has samples again"
        return len(self._out), self._out[told] + (f" ({more} more without)" if more else "")


def _why(balancer: Balancer, rank: int, shares: Sequence[int]) -> str:
    """Empty where it is not the time of a step: a batch too small for all, say."""
    others = max(balancer.predict(other, share) for other, share in enumerate(shares) if share > 0)
    idle, one = balancer.predict(rank, 0), balancer.predict(rank, 1)
    step = max(others, idle)
    if math.isnan(one) or math.isnan(step) or one <= step:
        return ""
    if idle > _LATE * others:
        return (
            f"rank {rank} has no samples, and still takes {1e3 * idle:.3g} ms a step where the others need "
            f"{1e3 * others:.3g} ms: start without it"
        )
    return (
        f"rank {rank} has no samples: {1e3 * step:.3g} ms a step instead of {1e3 * one:.3g}; some again once it needs less "
        f"than {1e3 * step:.3g} for one"
    )
