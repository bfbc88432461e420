"""Who gets how many samples of a batch: the balancer, the caller's schedule, or the plan's measuring steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from evenstep._core import Balancer, EvenstepError

# (number of the batch drawn, its samples) -> shares of the ranks
ShareSchedule = Callable[[int, int], Sequence[int]]


_DECIDED = 1024  # more than any loader draws ahead
_REMEMBERED = 24  # steps whose timings a checkpoint keeps: enough to draw lines by, too few to begin a trial


def equal_shares(batch: int, ranks: int) -> list[int]:
    return [batch // ranks + (1 if rank < batch % ranks else 0) for rank in range(ranks)]


def at_least_one(shares: Sequence[int]) -> list[int]:
    """No zero share where there are enough samples: taken from the largest."""
    mended = list(shares)
    if sum(mended) >= len(mended):
        for rank, share in enumerate(mended):
            if share == 0:
                mended[mended.index(max(mended))] -= 1
                mended[rank] = 1
    return mended


def none_alone(shares: Sequence[int]) -> list[int]:
    """No share of a single sample, of which a BatchNorm in training has no variance: it goes to the largest other."""
    mended = list(shares)
    for rank, share in enumerate(mended):
        if share == 1:
            mended[rank] = 0
            mended[mended.index(max(mended)) if max(mended) > 0 else rank] += 1
    return mended


class Shares:
    """Shares of one loader's batches; the same calls give the same shares on every rank."""

    def __init__(
        self,
        policy: str,
        ranks: int,
        batch: int,
        speeds: Sequence[float] | None = None,
        schedule: ShareSchedule | None = None,
        plan: Any = None,
    ) -> None:
        self.ranks, self.batch = ranks, batch
        self._schedule, self._plan = schedule, plan
        self._balancer = Balancer(policy, ranks, batch, speeds)
        self._timings: deque[list[tuple[int, float]]] = deque(maxlen=_REMEMBERED)
        self._drawn = 0
        self._decided: dict[tuple[int, int], list[int]] = {}  # (step, samples of the batch) -> shares
        self._on_equal = False

    @property
    def scheduled(self) -> bool:
        return self._schedule is not None

    def draw(self, batch: int, alone: bool = True, step: int | None = None) -> list[int]:
        """Shares of the next batch of `batch` samples. alone: a share may be a single sample.

        step: the optimizer step that the batch is expected in. All batches of one size in one step have the same
        shares, whichever loader they come from and when: a backward over several has one weight.
        """
        number = self._drawn
        self._drawn += 1
        if self._schedule is not None:
            shares = [int(share) for share in self._schedule(number, batch)]
            if len(shares) != self.ranks or min(shares) < 0 or sum(shares) != batch:
                raise EvenstepError(
                    f"the share schedule gave {shares} for batch {number} of {batch} samples on {self.ranks} ranks\n"
                    f"  fix: return {self.ranks} numbers >= 0 that add up to {batch}"
                )
            return shares
        shares = self._decide(batch, step) if self._plan is None else list(self._plan.shares(number, batch))
        return shares if alone else none_alone(shares)

    def _decide(self, batch: int, step: int | None) -> list[int]:
        if step is None:
            return list(self._balancer.shares(batch))
        key = (step, batch)
        if key not in self._decided:
            self._decided[key] = list(self._balancer.shares(batch))
            while len(self._decided) > _DECIDED:
                del self._decided[min(self._decided)]
        return list(self._decided[key])

    def split(self, batch: int) -> list[int]:
        """Shares by the speeds known now, for work outside training steps; no rank idle where that can be."""
        return at_least_one(self._balancer.shares(batch))

    def observe(self, timings: Sequence[tuple[int, float]], step_seconds: float) -> None:
        if self._plan is not None:
            self._plan.observe(timings, step_seconds)
        else:
            self._balancer.observe(timings)
            self._timings.append(list(timings))

    def state(self) -> list[list[list[float]]]:
        """The last steps' timings, a pair (samples, seconds) for each rank: what the balancer knows, whatever it makes
        of it."""
        return [[list(pair) for pair in timings] for timings in self._timings]

    def learn(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Takes the timings of an earlier run of the same ranks; once where several loaders share them."""
        if self.state() == [[list(pair) for pair in timings] for timings in state]:
            return
        for timings in state:
            self.observe([(int(samples), float(seconds)) for samples, seconds in timings], math.nan)

    def turned(self) -> tuple[bool, str] | None:
        """(True, measured times) once balanced shares were measured slower than equal ones, which run from now on;
        (False, times) once balanced ones run again; else None."""
        on_equal, balanced, equal = self._balancer.on_equal
        if on_equal == self._on_equal:
            return None
        self._on_equal = on_equal
        return on_equal, f"{1e3 * balanced:.4g} ms, equal {1e3 * equal:.4g} ms"

    def predict(self, shares: Sequence[int]) -> float:
        """Seconds of a step with these shares; NaN while unknown."""
        seconds = [self._balancer.predict(rank, share) for rank, share in enumerate(shares)]
        return max(seconds) if not any(math.isnan(s) for s in seconds) else math.nan
