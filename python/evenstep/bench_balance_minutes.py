"""About how long each part of `evenstep bench balance`'s real ranks takes, told before it begins: by what one core makes of samples
a second, and by what the parts are made of. Nothing is measured by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.bench_balance_bound import SIZES
from evenstep.bench_balance_courses import LEVELS, different, parts_of
from evenstep.bench_balance_courses import RUNS as COURSE_RUNS
from evenstep.bench_balance_courses import STEPS as COURSE_STEPS
from evenstep.bench_balance_noise import MIDDLE, SCANNED
from evenstep.bench_balance_noise import SCANS as NOISE_SCANS
from evenstep.bench_balance_noise import STEPS as NOISE_STEPS
from evenstep.bench_balance_steady import AGAIN, MEASURED, SCANS, SELDOM, judged, names_of

LEAST_STEPS, MOST_STEPS, WARM_UP = 3, 40, 2  # of a turn
TRIED = 5  # splits around the best one of two ranks; of more ranks two for each but the fastest, and the best one


@dataclass
class Length:
    """Of a bench of whole length; seconds, but for what is said otherwise."""

    rate: float  # samples a second of the fastest rank
    batch: int
    seconds: float  # of a turn
    rounds: int
    settle: int  # turns
    policies: Sequence[str]
    peers: bool

    def steady(self, speeds: Sequence[float]) -> float:
        steps = self._steps(speeds)
        best = steps["auto"]
        numbers = [judged(self.policies), *(["hand"] if self.peers else [])]
        names = [*self.policies, *(["ddp", "hand"] if self.peers else []), "single"]
        long = [name for name in names if (LEAST_STEPS + WARM_UP) * steps[name] > SELDOM * self.seconds]
        found = self._learn(best)
        found += self._settle(best, sum(one in MEASURED for one in self.policies))
        if self.peers:
            tried = TRIED if len(speeds) == 2 else 2 * len(speeds) - 1
            found += SCANS * (tried + AGAIN) * self._turn(best, self.seconds / 2)
        for number in range(self.rounds):
            ran = names_of(names, numbers, long, number)
            found += sum(self._turn(steps[name], self.seconds) for name in ran)
            found += (len(ran) + 1) * self._moment(best, self.seconds / 2)
        return found

    def slowing(self, ranks: int, slower: float, before: int, after: int, runs: int) -> float:
        fast, slow = (self._best([1.0] * (ranks - 1) + [part]) for part in (1.0, 1.0 / slower))
        each = runs * ((before + after + WARM_UP) * fast + after * slow)
        measured = [one for one in different(self.policies) if one in MEASURED]
        return self._learn(fast) + self._learn(slow) + self._settle(fast, len(measured)) + len(measured) * each

    def course(self, name: str, ranks: int, first: bool) -> float:
        """first: with what both courses are judged by."""
        speeds = [[1.0] * (ranks - 1) + [part] for part in parts_of(name, COURSE_STEPS)]
        found = sum(self._learn(self._best([1.0] * (ranks - 1) + [part])) for part in LEVELS) if first else 0.0
        for policy in different(self.policies):
            runs = COURSE_RUNS if policy == judged(self.policies) else 1
            steps = [self._steps(one)[policy] for one in speeds]
            found += runs * (sum(steps) + self._settle(steps[0], int(policy in MEASURED)))
        return found

    def noise(self, speeds: Sequence[float], policies: int) -> float:
        step = self._best(speeds) / MIDDLE
        tried = TRIED if len(speeds) == 2 else 2 * len(speeds) - 1
        scanned = (NOISE_SCANS * tried + policies * (self.settle + 1) // 2) * (SCANNED + WARM_UP)
        rounds = 2 * self.rounds * (1 + policies) * (NOISE_STEPS + WARM_UP)
        return self._learn(step) + (scanned + rounds) * step

    def _best(self, speeds: Sequence[float]) -> float:
        return self.batch / (self.rate * sum(speeds))

    def _steps(self, speeds: Sequence[float]) -> dict[str, float]:
        """Of each mode, as if samples alone took time."""
        equal = self.batch / len(speeds) / (self.rate * min(speeds))
        best = self._best(speeds)
        found = {"equal": equal, "ddp": equal, "single": self.batch / self.rate, "hand": best, "proportional": best}
        return found | dict.fromkeys(MEASURED, best)

    def _turn(self, step: float, seconds: float) -> float:
        return (min(MOST_STEPS, max(LEAST_STEPS, round(seconds / step))) + WARM_UP) * step

    def _settle(self, step: float, policies: int) -> float:
        return policies * self.settle * self._turn(step, self.seconds / 2)

    def _moment(self, step: float, seconds: float) -> float:
        """The ranks' speeds, with what is not counted before and after it."""
        return max(seconds, 2 * step) + (WARM_UP + 1) * step

    def _learn(self, step: float) -> float:
        return SIZES * (self._moment(step, self.seconds / 2 / SIZES) + 2 * self._moment(step, self.seconds / SIZES))
