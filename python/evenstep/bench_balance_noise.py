"""Real ranks of `evenstep bench balance` under noise: the quota of each is another in every step, by up to 20% of the step's time to
either side, and nothing changes in earnest. What a policy loses against the best fixed split, which runs under the same noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evenstep.bench_balance_report import interval

if TYPE_CHECKING:
    from evenstep.bench_balance import Bench
    from evenstep.bench_modes import Even, Turn

NOISE = 0.2
MIDDLE = 1 - NOISE  # part of its speed that a rank has in the middle, so that it may be faster, too
SPEEDS = {2: "2:1", 3: "4:2:1", 4: "12.7:9.1:3:3", 5: "16:8:4:2:1"}
STEPS = 40  # of a turn
SCANNED, SCANS = 24, 3  # steps and turns of each split that is tried
ASIDE = 2  # samples by which those of two ranks are tried on either side of the best one


def factors(seed: int, rank: int, steps: int) -> list[float]:
    """How many times as long as in the middle each step of a rank takes."""
    draw = random.Random(1000 * seed + rank)
    return [draw.uniform(1 - NOISE, 1 + NOISE) for _ in range(steps)]


def tried(split: Sequence[int]) -> list[list[int]]:
    """Splits around the best one at the middle speeds: of two ranks some on either side, of more each rank with a sample more and
    less, which the fastest gives and takes."""
    other = 0 if len(split) == 2 else split.index(max(split))
    if len(split) == 2:
        moves = [(1, by) for by in range(-ASIDE, ASIDE + 1)]
    else:
        moves = [(other, 0), *((rank, by) for rank in range(len(split)) if rank != other for by in (-1, 1))]
    found = []
    for rank, by in moves:
        one = list(split)
        one[rank] += by
        one[other] -= by
        if min(one) >= 0 and one not in found:
            found.append(one)
    return found


class Noise:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        quick = bench.options.quick
        self._steps = 6 if quick else STEPS
        self._rounds = 1 if quick else 2 * bench.options.rounds
        self._scanned, self._scans = (4, 1) if quick else (SCANNED, SCANS)
        self._fixed: list[int] = []  # that runs
        self.name = SPEEDS.get(bench.ranks, ":".join(["1"] * bench.ranks))
        self.case = f"{self.name}, noise of {100 * NOISE:.0f} % in every rank's quota"

    def run(self, policies: Sequence[str]) -> list[dict[str, Any]]:
        """Policies that follow what is measured, and the best fixed split beside them."""
        from evenstep.bench_balance import speeds_of
        from evenstep.bench_modes import Even

        bench = self._bench
        self._speeds = speeds_of(self.name)
        evens = {policy: Even(bench.work, policy, self._speeds, bench.base) for policy in policies}
        fixed = Even(bench.work, "equal", self._speeds, bench.base, lambda number, batch: self._fixed)
        best = self._best_fixed(fixed)
        for number in range((bench.options.settle + 1) // 2):
            for even in evens.values():
                self._turn(even, 100 + number, self._scanned)
        rounds = [self._round(evens, fixed, number) for number in range(self._rounds)]
        for one in (fixed, *evens.values()):
            one.close()
        rows = [row_of(self.case, policy, rounds, best, bench.options.batch) for policy in ("fixed", *policies)]
        for row in rows:
            bench.say(
                f"  {row['policy']:13s} {row['samples_per_second']:8.1f} samples/s, {100 * row['lost']:.1f} % less than split {best}"
            )
        return rows

    def _best_fixed(self, fixed: Even) -> list[int]:
        """The fastest of those around the best split at the middle speeds, tried under noise."""
        bench = self._bench
        splits = tried(bench.bound([MIDDLE * speed for speed in self._speeds]).split)
        took: list[list[float]] = [[] for _ in splits]
        for scan in range(self._scans):
            steps: dict[int, float] = {}
            for number in sorted(
                range(len(splits)), reverse=scan % 2 == 1
            ):  # forth and back: the machine's speed moves, too
                self._fixed = splits[number]
                steps[number] = self._turn(fixed, 200 + scan, self._scanned).step
            for number, step in steps.items():
                took[number].append(step / statistics.fmean(steps.values()))
        medians = [statistics.median(one) for one in took]
        self._fixed = list(bench.agreed(splits[medians.index(min(medians))]))
        return self._fixed

    def _round(self, evens: dict[str, Even], fixed: Even, number: int) -> dict[str, Turn]:
        """Each once, under the same noise, in another order each time."""
        turns = {"fixed": fixed, **evens}
        names = list(turns)
        at = number % len(names)
        return {name: self._turn(turns[name], number, self._steps) for name in names[at:] + names[:at]}

    def _turn(self, even: Even, seed: int, steps: int) -> Turn:
        found = even.turn(steps, self._disturb(factors(seed, self._bench.rank, steps)))
        self._bench.hold([MIDDLE * speed for speed in self._speeds])
        return found

    def _disturb(self, times: Sequence[float]) -> Callable[[int], None]:
        bench = self._bench
        own = bench.scale * MIDDLE * self._speeds[bench.rank]

        def before(step: int) -> None:
            bench.slowing.hold(own / times[step])

        return before


def row_of(
    case: str, policy: str, rounds: Sequence[dict[str, Turn]], fixed: Sequence[int], batch: int
) -> dict[str, Any]:
    """Beside the fixed split of the same round. The warm-up steps of a turn have no noise and do not count."""
    from evenstep.bench_modes import usage_of

    rates = [batch / one[policy].step for one in rounds]
    bounds = [batch / one["fixed"].step for one in rounds]
    lost = [1 - rate / bound for rate, bound in zip(rates, bounds)]
    return {
        "case": case,
        "course": "noise",
        "ranks": len(fixed),
        "policy": policy,
        "samples_per_second": statistics.median(rates),
        "bound_samples_per_second": statistics.median(bounds),
        "of_bound": 1 - statistics.median(lost),
        **usage_of([one[policy] for one in rounds]),
        "lost": statistics.median(lost),
        "lost_interval": interval(lost),
        "rates": rates,
        "shares": rounds[-1][policy].shares[-1],
        "fixed_split": list(fixed),
    }
