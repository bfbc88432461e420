"""es.prepare(workers="auto"): how many workers each rank's loader gets, by what loading took of its first steps."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 8  # measured, after those that warm up
WARM_UP = 2
MATTERS = 0.05  # of a step
HEADROOM = 1.25


@dataclass(frozen=True)
class Measured:
    """One rank's: seconds of a step, medians."""

    loading: float
    work: float  # without loading, and without waiting for other ranks
    busy_loading: float  # part of loading in which it computes, rather than waits for a disk
    cores: float  # that it has for itself


def most_workers(cores: float) -> int:
    """One core is for training; one worker is allowed anywhere."""
    return max(1, math.floor(cores) - 1)


def wanted(one: Measured, slowest_work: float) -> int:
    """Workers that load a batch for each step of the slowest rank."""
    if one.loading < MATTERS * (one.loading + one.work):
        return 0
    if one.cores < 2 and one.busy_loading > 0.5:
        return 0  # a worker would take the core from training
    return min(most_workers(one.cores), math.ceil(HEADROOM * one.loading / max(slowest_work, 1e-9)))


def sizes(ranks: Sequence[Measured]) -> list[tuple[int, int]]:
    """(workers, prefetch_factor) of each rank; [] where none is worth it. All draw equally many batches ahead, so that a
    step's shares are decided at one time on all ranks: where one has workers, each has at least one."""
    slowest = max(one.work for one in ranks)
    needed = [wanted(one, slowest) for one in ranks]
    if max(needed) == 0:
        return []
    least = 2 * max(needed)
    choices = [_divided(needed, ranks, ahead) for ahead in range(least, 2 * least + 1)]
    return max(
        choices, key=lambda chosen: min(min(1, workers / (need or 1)) for (workers, _), need in zip(chosen, needed))
    )


def _divided(needed: Sequence[int], ranks: Sequence[Measured], ahead: int) -> list[tuple[int, int]]:
    """So many batches drawn ahead, by at least the needed workers of each rank where its cores allow that."""
    divisors = [number for number in range(1, ahead + 1) if ahead % number == 0]
    chosen = []
    for need, one in zip(needed, ranks):
        allowed = [number for number in divisors if number <= most_workers(one.cores)]
        workers = next((number for number in allowed if number >= need), allowed[-1])
        chosen.append((workers, ahead // workers))
    return chosen


class WorkerSizing:
    """Of one loader, until it has decided."""

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        self._rank, self._gather = rank, gather
        self._steps: list[tuple[float, float, float]] = []
        self._loading = self._computing = 0.0
        self._step = -1
        self._since = self._blocked = 0.0
        self._asked = 0.0, 0.0

    def ask(self) -> None:
        """A batch is asked for."""
        self._asked = time.perf_counter(), time.process_time()

    def arrive(self) -> None:
        self._loading += time.perf_counter() - self._asked[0]
        self._computing += time.process_time() - self._asked[1]

    def step(self, step: int, blocked_seconds: float) -> list[tuple[int, int]] | None:
        """Between two batches; what sizes() gives, once enough was measured. Collective then."""
        if step == self._step:
            return None  # accumulation
        now = time.perf_counter()
        if self._step >= 0:
            work = now - self._since - self._loading - (blocked_seconds - self._blocked)
            self._steps.append((self._loading, max(0.0, work), self._computing))
        self._step, self._since, self._blocked = step, now, blocked_seconds
        self._loading = self._computing = 0.0
        if len(self._steps) < WARM_UP + STEPS:
            return None
        loading, work, computing = (statistics.median(column) for column in zip(*self._steps[WARM_UP:]))
        everybody = self._gather(
            (loading, work, computing, _allowed(), os.uname().nodename, sorted(os.sched_getaffinity(0)))
        )
        ranks = [Measured(one[0], one[1], one[2] / max(one[0], 1e-9), _cores(one, everybody)) for one in everybody]
        chosen = sizes(ranks)
        if chosen and self._rank == 0:
            most = max(range(len(ranks)), key=lambda rank: ranks[rank].loading)
            part = ranks[most].loading / (ranks[most].loading + ranks[most].work)
            sys.stderr.write(
                f"evenstep: loading took {100 * part:.0f}% of the first steps of rank {most}: from now on "
                f"{', '.join(str(workers) for workers, _ in chosen)} workers load for the ranks\n"
            )
        return chosen


def _cores(one: Any, everybody: Sequence[Any]) -> float:
    """That a rank has: its quota, or its part of the cores on which it may run, with others of its host."""
    _, _, _, quota, host, mask = one
    sharing = sum(other[4] == host and not set(other[5]).isdisjoint(mask) for other in everybody)
    return min(quota, len(mask) / max(1, sharing))


def _allowed(root: str = "") -> float:
    """CPU seconds a second that control groups allow this process; infinite where they do not say."""
    least = math.inf
    try:
        lines = Path(f"{root}/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return least
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = Path(f"{root}/sys/fs/cgroup{'/' + 'cpu' if controllers else ''}")
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            least = min(least, _quota(group))
            if group == top:
                break
    return least


def _quota(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip() for name in ("quota", "period")
            )
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
