"""What balancing costs by itself, as `evenstep bench balance` measures it: all that a step would not need on ranks that never move
a share, by the calls of a training, without a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from evenstep import _core, vote
from evenstep.feeds import BatchPlan
from evenstep.memory import HostMemory, MemoryWatch, RanksMemory
from evenstep.shares import Shares
from evenstep.step_part import StepPart
from evenstep.verify_runs import fresh

if TYPE_CHECKING:
    from evenstep.session import Session


_CYCLE = 64  # steps: quotas and memory are read in some of them, the same of each so many


class _Seconds:
    """Of each step."""

    def __init__(self) -> None:
        self._of_steps: list[float] = []

    def begin(self) -> None:
        self._of_steps.append(0.0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._of_steps[-1] += time.perf_counter() - began

    def mean(self) -> float:
        return statistics.fmean(self._of_steps)

    def usual(self) -> float:
        """Of what is the same in each cycle: without what held the rank up in some of them."""
        return statistics.fmean(statistics.median(self._of_steps[at::_CYCLE]) for at in range(_CYCLE))


class Overhead:
    """Of one rank's steps, whose ranks' times are invented: the same on all."""

    def __init__(self, base: Session, batch: int) -> None:
        self._steps = fresh(base).steps
        self._ranks, self._rank, self._batch = base.world_size, base.rank, batch
        self._shares = Shares("auto", self._ranks, batch, [1.0] * self._ranks)
        watch = MemoryWatch(HostMemory())
        self._memory = self._steps.memory = RanksMemory(watch, [watch.pool] * self._ranks, self._rank)
        self._part = StepPart()
        self._deciding, self._telling = _Seconds(), _Seconds()
        self._random = 1

    def measure(self, count: int) -> dict[str, float]:
        """Seconds a step, of so many, at least 64. deciding: drawing shares, learning from the step, and from what memory holds. telling: reading clocks,
        quotas and memory, this rank's ballot, and reading all ranks'. vote: their way. Collective."""
        for step in range(count):
            self._step(step)
        group, record = self._steps.group, bytes(vote.BYTES)
        group.barrier()
        voting = []
        for _ in range(count):
            began = time.perf_counter()
            group.exchange(record)
            voting.append(time.perf_counter() - began)
        return {
            "deciding_seconds": self._deciding.mean(),
            "telling_seconds": self._telling.usual(),
            "vote_seconds": statistics.median(voting),
        }

    def _step(self, step: int) -> None:
        steps, part, times = self._steps, self._part, self._steps.times
        self._deciding.begin()
        self._telling.begin()
        with self._deciding.counted():
            drawn = self._shares.draw(self._batch, step=step)
        mine = drawn[self._rank]
        plan = BatchPlan(cast(Any, None), 0, step, self._batch, drawn, mine, 1, 0.0)
        with self._telling.counted():
            times.batch_arrives(step, _core.clock_ns())
            part.batch_arrives(plan)
            times.backward_begins(step, forward=True)
            end = times.backward_ends(step)
            busy = times.busy_until(end)
            flags = steps.votes.flags(1.0)
            self._memory.watch.stepped(step, mine, drawn)
            part.ballot(steps, 1.0, busy, flags).pack()
        records = self._told(step, drawn)
        with self._telling.counted():
            times.meets_to_exchange()
            ballots = [vote.unpack(record) for record in records]
            steps.votes.check(ballots)
            steps.votes.hear(ballots)
            times.synchronised(step, end)
            part.begins_anew()
            times.committed(1)
            times.stepped(step)
        timings = [(one.samples, one.busy_seconds) for one in ballots]
        with self._deciding.counted():
            shares = self._shares
            shares.take_micro_batches([(one.micro_batch, one.piece_samples) for one in ballots])
            own, passes = [one.exchange_seconds for one in ballots], [one.pass_seconds for one in ballots]
            shares.observe(timings, 0.1, vote.spared(ballots), own, passes)
            shares.turned()
            shares.left_out(timings)
            shares.take_memory(self._memory.reports(ballots, timings))

    def _told(self, step: int, shares: list[int]) -> list[bytes]:
        """What all ranks say: the later ones are slower, with some noise."""
        records = []
        for rank, share in enumerate(shares):
            self._random = (self._random * 6364136223846793005 + 1442695040888963407) % 2**64
            busy = (1 + rank) * (0.002 + 0.001 * share) * (0.95 + 0.1 * self._random / 2**64)
            one = vote.Ballot(1, step, share, self._batch, busy, 0.0, 1.0, 1, 1, 0, 1, 0, 0, 1, drawn=1)
            records.append(one.pack())
        return records
