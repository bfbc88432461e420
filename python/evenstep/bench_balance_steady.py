"""Real ranks of `evenstep bench balance` whose speeds stay: each policy, plain PyTorch and one device take turns, and each turn is
judged by the best split at the speeds right before and right after it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from evenstep.bench_balance_bound import Bound, Moment, between, seconds_of
from evenstep.bench_balance_noise import tried
from evenstep.bench_balance_report import interval, quartiles

if TYPE_CHECKING:
    from evenstep.bench_balance import Bench
    from evenstep.bench_modes import Turn

MEASURED = ("dynamic", "hybrid", "auto")  # policies that follow what is measured
TIMES = 3  # in a round that the modes run of which the numbers are made
SELDOM = 3  # rounds of which a mode runs in one, where its turns are this many times as long as they are to be
SCANS = 4  # turns of each split that is tried by hand
AGAIN = 2  # of them that are tried once more: what was the fastest in so few turns was so by luck, too

Round = dict[str, list[tuple["Turn", Moment]]]  # of each mode its turns, and the speeds at the time of each


def judged(policies: Sequence[str]) -> str:
    """Whose figures count: the default's where it runs, else the last one's that follows what is measured, else the last's."""
    measured = [one for one in policies if one in MEASURED]
    return "auto" if "auto" in policies else (measured or policies)[-1]


def order_of(numbers: Sequence[str], others: Sequence[str], number: int, times: int = TIMES) -> list[str]:
    """The modes of a round: those that numbers are made of so many times, and the others among them, from another one on each time;
    every second round the other way round, so that what the machine's speed does meets all of them alike."""
    at = number % max(1, len(others))
    turned = [*others[at:], *others[:at]]
    found: list[str] = []
    for one in range(times):
        found += numbers if one % 2 == 0 else reversed(numbers)
        found += turned[len(turned) * one // times : len(turned) * (one + 1) // times]
    return found if number % 2 == 0 else found[::-1]


def names_of(
    names: Sequence[str], numbers: Sequence[str], long: Sequence[str], number: int, times: int = TIMES
) -> list[str]:
    """Which modes run in a round, in their order."""
    others = [one for one in names if one not in numbers and (number % SELDOM == 0 or one not in long)]
    return order_of(numbers, others, number, times)


class Steady:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._numbers = [judged(bench.policies), *(["hand"] if bench.plain is not None else [])]

    def run(self, name: str) -> list[dict[str, Any]]:
        """Ranks of these speeds."""
        from evenstep.bench_balance import speeds_of
        from evenstep.bench_modes import Even
        from evenstep.shares import equal_shares

        bench, batch, speeds = self._bench, self._bench.options.batch, speeds_of(name)
        bench.seconds_of.clear()
        bound = bench.bound(speeds)
        evens = {policy: Even(bench.work, policy, speeds, bench.base) for policy in bench.policies}
        turns: dict[str, Callable[[], Turn]] = {}
        turns |= {policy: partial(bench.turn, policy, even.turn) for policy, even in evens.items()}
        splits: dict[str, list[int]] = {}
        if bench.plain is not None:
            splits = {"ddp": equal_shares(batch, bench.ranks), "hand": self._hand_tuned(bound.split)}
        turns |= {kind: partial(self._plain, kind, parts) for kind, parts in splits.items()}
        turns["single"] = partial(bench.turn, "single", bench.single.turn)
        bench.settle({policy: even for policy, even in evens.items() if policy in MEASURED})
        rounds = [self._round(turns, bound, number) for number in range(bench.options.rounds)]
        for even in evens.values():
            even.close()
        rows = [row_of(name, kind, rounds, bound, splits.get(kind), batch) for kind in turns]
        for row in rows:
            low, high = row["of_bound_interval"]
            bench.say(
                f"  {row['policy']:13s} {row['samples_per_second']:8.1f} samples/s, {row['of_bound']:.3f} of the best split "
                f"({low:.3f} to {high:.3f})"
            )
        return rows

    def _plain(self, mode: Any, split: Sequence[int], seconds: float | None = None) -> Turn:
        """A turn of plain PyTorch with this split."""
        plain = self._bench.plain
        assert plain is not None
        return self._bench.turn(mode, lambda count: plain.turn(count, split), seconds)

    def _hand_tuned(self, split: list[int]) -> list[int]:
        """The fastest split of those around the best one, tried as a patient user would: all of them, then the best two again."""
        from evenstep.shares import at_least_one

        bench = self._bench
        split = at_least_one(split)  # DDP's ranks all have samples
        if bench.options.quick:
            return split
        around = dict(enumerate(one for one in tried(split) if min(one) > 0))
        best = self._fastest_first(around)[:AGAIN]
        return around[self._fastest_first({number: around[number] for number in best})[0]]

    def _fastest_first(self, splits: Mapping[int, list[int]]) -> list[int]:
        """Their numbers, by what each scan found of a split beside the others: the machine's speed moves from scan to scan."""
        took: dict[int, list[float]] = {number: [] for number in splits}
        for scan in range(SCANS):
            steps: dict[int, float] = {}
            for number in sorted(splits, reverse=scan % 2 == 1):
                steps[number] = self._plain(("scan", number), splits[number], self._bench.options.seconds / 2).step
            for number, step in steps.items():
                took[number].append(step / statistics.fmean(steps.values()))
        return list(self._bench.agreed(sorted(took, key=lambda number: statistics.median(took[number]))))

    def _round(self, turns: dict[str, Callable[[], Turn]], bound: Bound, number: int) -> Round:
        bench = self._bench
        long = [name for name in turns if bench.long(name)]
        names = bench.agreed(names_of(list(turns), self._numbers, long, number, 1 if bench.options.quick else TIMES))
        found: Round = {name: [] for name in turns}
        before = bound.now()
        for name in names:
            turn = turns[name]()
            after = bound.now()
            found[name].append((turn, between(before, after)))
            before = after
        bound.follow()
        return found


def row_of(
    name: str, kind: str, rounds: Sequence[Round], bound: Bound, split: list[int] | None, batch: int
) -> dict[str, Any]:
    """A mode's figures in a case. Of plain PyTorch, whose waits nobody sees, utilisation is by the ranks' speeds."""
    turns = [turn for one in rounds for turn in one[kind]]
    parts = [moment.seconds / turn.step for turn, moment in turns]
    bounds = [batch / moment.seconds for moment in bound.moments]
    ranks = len(bound.lines)
    busy: list[list[float]] = []  # of a turn: each rank's seconds a step
    for turn, moment in turns:
        if turn.busy:
            busy.append([statistics.fmean(step[rank] for step in turn.busy) for rank in range(ranks)])
        elif split is not None:
            busy.append([seconds_of(line, share) for line, share in zip(moment.lines, split)])
        else:
            busy.append([turn.step] + [0.0] * (ranks - 1))
    used = [[min(1.0, one / turn.step) for one in of_turn] for of_turn, (turn, _) in zip(busy, turns)]
    last = turns[-1][0].shares
    return {
        "case": name,
        "course": "steady",
        "ranks": ranks,
        "policy": kind,
        "samples_per_second": statistics.median(batch / turn.step for turn, _ in turns),
        "bound_samples_per_second": statistics.median(bounds),
        "bound_quartiles": quartiles(bounds),
        "bound_moments": len(bounds),
        "of_bound": statistics.median(parts),
        "of_bound_interval": interval(parts),
        "of_bound_turns": parts,
        "rates": [[batch / turn.step for turn, _ in one[kind]] for one in rounds],
        "utilisation": [statistics.median(one[rank] for one in used) for rank in range(ranks)],
        "imbalance": statistics.median(max(one) / statistics.fmean(one) - 1 for one in busy),
        "shares": last[-1] if last else split or [batch] + [0] * (ranks - 1),
        "best_split": bound.split,
    }
