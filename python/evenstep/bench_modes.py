"""What `evenstep bench balance` lets take turns: the same model and step, trained by Evenstep with each policy, by plain
PyTorch, on one device alone, and by all ranks without any exchange, which tells their speeds.

Every rank of a job makes the same calls. A turn is some steps; between turns a mode stands still.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenstep.bench_work import MOST_STEPS, WARM_UP, Work
from evenstep.environment import Environment
from evenstep.group import TorchGroup, gather_objects
from evenstep.kept_memory import begin_where_asked, kept_memory
from evenstep.prepare import prepare
from evenstep.session import Session, in_place_of_session
from evenstep.share_schedule import ShareSchedule
from evenstep.verify_runs import fresh

LEAST_STEPS = 2  # in which a rank's speed is measured


@dataclasses.dataclass
class Turn:
    """What a turn was like; all but `seconds` only where the mode knows it."""

    seconds: list[float]  # of each step that counts
    shares: list[list[int]] = dataclasses.field(default_factory=list)  # of each of these, one a rank
    busy: list[list[float]] = dataclasses.field(default_factory=list)  # seconds without waiting, one a rank

    @property
    def step(self) -> float:
        return statistics.fmean(self.seconds)


def usage_of(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians over turns that tell what ranks are busy: the part of its time in which each one is, and how much longer than the
    mean one the longest of a step is."""
    used = [[statistics.fmean(one) / turn.step for one in zip(*turn.busy)] for turn in turns]
    longest = [
        statistics.fmean(max(one) / max(statistics.fmean(one), 1e-12) - 1 for one in turn.busy) for turn in turns
    ]
    return {
        "utilisation": [statistics.median(min(1.0, one) for one in of_rank) for of_rank in zip(*used)],
        "imbalance": statistics.median(longest),
    }


def _turn(batches: Any, count: int, step: Callable[[int, Any, Any], None]) -> Turn:
    """step(number of the step that counts, or below 0, what the model is given, targets)"""
    ends = []
    for number, (given, targets) in enumerate(batches, -WARM_UP):
        step(number, given, targets)
        ends.append(time.perf_counter())
        if number == count - 1:
            break
    return Turn([b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:])])


class Even:
    """es.prepare with a policy, in a session of its own. speeds: what a profile would say. schedule: whose shares run instead."""

    def __init__(
        self,
        work: Work,
        policy: str,
        speeds: Sequence[float],
        base: Session,
        schedule: ShareSchedule | None = None,
    ) -> None:
        self._work, self._session = work, fresh(base)
        self._session.environment = dataclasses.replace(
            self._session.environment, policy=policy, speeds=tuple(speeds), compression="", memory_limit=None
        )
        with in_place_of_session(self._session):
            self._model, self._optimizer, self._loader = prepare(
                *work.build(), work.loader(work.batch), shares=schedule, batch_norm=work.batch_norm
            )

    def turn(self, count: int, before: Callable[[int], None] = lambda step: None) -> Turn:
        """before: called before each step that counts, with its number."""
        shares: list[list[int]] = []
        busy: list[list[float]] = []

        def step(number: int, given: torch.Tensor, targets: torch.Tensor) -> None:
            if number >= 0:
                before(number)
            counted, latest = self._work.counts(targets), self._session.latest
            if counted is not None:
                self._session.steps.weight.give(counted if latest is None or latest.samples else 0)
            self._work.step(self._model, self._optimizer, given, targets)
            if number >= 0:
                timings = self._loader.shares.last
                shares.append([int(one[0]) for one in timings])
                busy.append([float(one[1]) for one in timings])

        with in_place_of_session(self._session):
            found = _turn(self._loader, count, step)
        return dataclasses.replace(found, shares=shares, busy=busy)

    def close(self) -> None:
        self._session.checks.forget()
        for sync in self._session.steps.syncs:
            sync.close()


class Plain:
    """DistributedDataParallel over Gloo, any fixed split; each loss is weighted by hand where it is unequal."""

    def __init__(self, work: Work, group: Any) -> None:
        self._work, self._rank, self._ranks = work, dist.get_rank(), dist.get_world_size()
        model, self._optimizer = work.build()
        self._model = DistributedDataParallel(model, process_group=group)

    def turn(self, count: int, split: Sequence[int]) -> Turn:
        own = split[self._rank]
        weight = own * self._ranks / sum(split)  # DDP divides by the number of ranks

        def step(_: int, given: torch.Tensor, targets: torch.Tensor) -> None:
            self._work.step(self._model, self._optimizer, given, targets, weight)

        with kept_memory.paused():  # as plain PyTorch has it
            return _turn(self._work.loader(own), count, step)


class Single:
    """Rank 0 alone with the whole batch; the others wait."""

    def __init__(self, work: Work, group: Any) -> None:
        self._work, self._group, self._alone = work, group, dist.get_rank() == 0
        self._model, self._optimizer = work.build()

    def turn(self, count: int) -> Turn:
        own: Turn | None = None
        if self._alone:
            batches = self._work.loader(self._work.batch)
            with kept_memory.paused():
                own = _turn(batches, count, lambda _, x, y: self._work.step(self._model, self._optimizer, x, y))
        turn: Turn = gather_objects(TorchGroup(self._group), own)[0]
        return turn


class Alone:
    """Every rank by itself while all of them work: what its speed is. With the memory that a rank keeps between steps."""

    def __init__(self, work: Work, group: Any, environment: Environment) -> None:
        self._work, self._group = work, group
        begin_where_asked(environment, "cpu")
        self._model, self._optimizer = work.build()

    def step_seconds(self, sizes: Sequence[int], seconds: float) -> list[float]:
        """Each rank's mean of a step of its size, over about so many seconds. A rank whose steps are over goes on until the last
        one's are, so that none of them is measured while another stands still. How many count is known before they run: ended
        by the time that they took, they would be too many where they are short, and end with a long one too often."""
        batches = self._endless(sizes[dist.get_rank()])
        for _ in range(WARM_UP):
            began = time.perf_counter()
            self._work.step(self._model, self._optimizer, *next(batches))
        count = min(MOST_STEPS, max(LEAST_STEPS, round(seconds / max(time.perf_counter() - began, 1e-6))))
        dist.barrier(group=self._group)
        began = time.perf_counter()
        for _ in range(count):
            self._work.step(self._model, self._optimizer, *next(batches))
        own = (time.perf_counter() - began) / count
        done = dist.barrier(group=self._group, async_op=True)
        while not done.is_completed():
            self._work.step(self._model, self._optimizer, *next(batches))
        done.wait()
        return gather_objects(TorchGroup(self._group), own)

    def _endless(self, size: int) -> Iterator[Any]:
        while True:
            yield from self._work.loader(size)
