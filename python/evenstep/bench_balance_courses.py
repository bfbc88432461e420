"""Real ranks of `evenstep bench balance` whose speeds do not stay: the last one drifts to a quarter of its speed, or has it in
bursts. Its quota is set while it trains; the bound is the best split of each step, at the speeds measured for its quota."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from evenstep.bench_balance_bound import best_split, split_seconds
from evenstep.bench_balance_steady import MEASURED, judged

if TYPE_CHECKING:
    from evenstep.bench_balance import Bench
    from evenstep.bench_modes import Even, Turn

STEPS = 120
RUNS = 2  # of the policy whose figures count; of others one
SLOWEST = 0.25  # of its speed, where it drifts to
BURST = 1 / 3  # of its speed, between the bursts
LEVELS = (SLOWEST, BURST, 0.5, 0.7, 1.0)  # parts of its speed for which all ranks' speeds are measured
NAMES = {
    "drifting": "the last rank drifts to a quarter of its speed",
    "bursty": "the last rank in bursts, three times slower for 10 to 40 steps",
}

Lines = Sequence[tuple[float, float]]  # (fixed seconds, seconds a sample) of each rank


def parts_of(course: str, steps: int, whole: bool = False) -> list[float]:
    """The part of its speed that the last rank has in each step; as the simulated ones. whole: only those that so many busy
    neighbours leave."""
    if course == "drifting":
        slower = [1.0 + (1 / SLOWEST - 1.0) * step / max(1, steps - 1) for step in range(steps)]
        return [1.0 / (round(one) if whole else one) for one in slower]
    draw = random.Random(7)
    parts: list[float] = []
    part = 1.0
    while len(parts) < steps:
        parts += [part] * draw.randint(10, 40)
        part = BURST if part == 1.0 else 1.0
    return parts[:steps]


def lines_at(part: float, levels: Sequence[float], measured: Sequence[Lines]) -> list[tuple[float, float]]:
    """Between the measured levels (ascending), by how much slower the rank is."""
    at = bisect_left(levels, part)
    if at == 0 or levels[min(at, len(levels) - 1)] == part:
        return list(measured[at])
    if at == len(levels):
        return list(measured[-1])
    below, above = 1 / levels[at - 1], 1 / levels[at]
    f = (1 / part - above) / (below - above)
    pairs = zip(measured[at], measured[at - 1])
    return [(a[0] + f * (b[0] - a[0]), a[1] + f * (b[1] - a[1])) for a, b in pairs]


def different(policies: Sequence[str]) -> list[str]:
    """Those that differ where a profile says that all ranks are alike: `proportional` is `equal` then, and `hybrid` is `dynamic`."""
    twins = {"proportional": "equal", "hybrid": "dynamic"}
    return [one for one in policies if one == judged(policies) or twins.get(one) not in policies]


class Courses:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        quick = bench.options.quick
        self._steps, self._runs = (16, 1) if quick else (STEPS, RUNS)
        self._levels = [level for level in LEVELS if not quick or level in (SLOWEST, BURST, 1.0)]
        self._measured: list[Lines] = []  # at these; the courses share them

    def run(self, course: str) -> list[dict[str, Any]]:
        bench = self._bench
        if not self._measured:
            self._measured = [self._measure(level) for level in self._levels]
            bench.slowing.hold(bench.scale)
        parts = parts_of(course, self._steps, bench.options.slow_by != "quota")
        lines = [lines_at(part, self._levels, self._measured) for part in parts]
        return [self._policy(course, policy, parts, lines) for policy in different(bench.policies)]

    def _measure(self, level: float) -> list[tuple[float, float]]:
        bench = self._bench
        speeds = [*[1.0] * (bench.ranks - 1), level]
        return bench.bound(speeds).lines

    def _policy(self, course: str, policy: str, parts: Sequence[float], lines: Sequence[Lines]) -> dict[str, Any]:
        from evenstep.bench_modes import Even

        bench = self._bench
        even = Even(bench.work, policy, [1.0] * bench.ranks, bench.base)
        turns = []
        for _ in range(self._runs if policy == judged(bench.policies) else 1):
            if policy in MEASURED:
                bench.seconds_of.clear()
                bench.settle({policy: even})
            turns.append(self._one(even, parts))
        even.close()
        row = row_of(course, policy, turns, lines, bench.options.batch)
        bench.say(
            f"  {policy:13s} {row['samples_per_second']:8.1f} samples/s, {row['of_bound']:.3f} of the best splits"
        )
        return row

    def _one(self, even: Even, parts: Sequence[float]) -> Turn:
        """From as fast as the others, and back to it."""
        bench = self._bench
        found = even.turn(len(parts), self._holds(parts))
        bench.slowing.hold(bench.scale)
        return found

    def _holds(self, parts: Sequence[float]) -> Callable[[int], None]:
        bench = self._bench

        def before(step: int) -> None:
            changed = step == 0 or parts[step] != parts[step - 1]
            if changed and bench.rank == bench.ranks - 1:
                bench.slowing.hold(bench.scale * parts[step])

        return before


def row_of(course: str, policy: str, turns: Sequence[Turn], lines: Sequence[Lines], batch: int) -> dict[str, Any]:
    """of_bound: by the times of the steps; of_splits: by the shares that ran alone, as if nothing else took time."""
    from evenstep.bench_modes import usage_of

    ideal = [best_split(one, batch)[1] for one in lines]
    rates, splits = [], []
    for turn in turns:
        rates.append(batch * len(turn.seconds) / sum(turn.seconds))
        theirs = [split_seconds(one, shares) for one, shares in zip(lines, turn.shares)]
        splits.append(sum(ideal) / sum(theirs))
    bound = batch * len(ideal) / sum(ideal)
    return {
        "case": NAMES[course],
        "course": course,
        "ranks": len(lines[0]),
        "policy": policy,
        "samples_per_second": statistics.median(rates),
        "bound_samples_per_second": bound,
        "of_bound": statistics.median(rates) / bound,
        "of_splits": statistics.median(splits),
        "rates": rates,
        **usage_of(turns),
        "shares": [list(one) for one in turns[0].shares],
    }
