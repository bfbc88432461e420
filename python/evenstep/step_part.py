"""This rank's part of the step under way: what it tells of it in the vote (evenstep.vote)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstep import vote
from evenstep.step_loss import StepLoss

if TYPE_CHECKING:
    from evenstep.buffers import Change
    from evenstep.gradients import GradientSync
    from evenstep.loader import BatchPlan
    from evenstep.steps import Steps


# samples of this rank and of all, batches; ns in which this rank was busy, by its quota, by the clock alone, and waited for
# others within the step
_Counts = tuple[int, int, int, int, int, int]
_NOTHING = (0, 0, 0, 0, 0, 0)


class StepPart:
    """What counts up does so since the last commit."""

    def __init__(self) -> None:
        self.loss = StepLoss()
        self.changed: list[Change] = []  # buffers
        self.parameters: int | None = None  # their sum, where the vote under way compares it
        self.backwards = 0  # exchanged ones; since the last void pass
        self._shares: list[int] = []  # of the last batch
        self._begin()
        self._forget_untold()

    def _begin(self) -> None:
        self.samples = self.total = self.batches = 0
        self.passes = self.spared_passes = 0

    def _forget_untold(self) -> None:
        """Of steps that had no vote, and of the one under way."""
        self.checksum = self._drawn = 0
        self._untold = _NOTHING

    def begins_anew(self, told: bool = True, busy_ns: int = 0, seen_ns: int = 0, waited_ns: int = 0) -> None:
        """After a commit. told: nothing is left for the next vote. Times: of a step that had none, as _Counts has them."""
        if told:
            self._forget_untold()
        else:
            self._drawn += self.batches
            step = (self.samples, self.total, self.batches, busy_ns, seen_ns, waited_ns)
            self._untold = _added(self._untold, step)
        self._begin()
        self.loss.sum = 0.0

    def is_void(self) -> None:
        """It comes again."""
        self._begin()
        self._forget_untold()
        self.backwards = 0
        self.loss.forget()

    def batch_arrives(self, plan: BatchPlan) -> None:
        if plan.shares != self._shares:  # times of other ones would say nothing of these
            self._shares, self._untold = plan.shares, _NOTHING
        shares = hash(tuple(plan.shares))  # of whole numbers: the same in every process
        self.checksum = (self.checksum * 31 + plan.checksum + plan.total + shares) & 0xFFFFFFFFFFFFFFFF
        self.samples += plan.samples
        self.total += plan.total
        self.batches += 1

    @property
    def spared(self) -> bool:
        """Whether every backward was left out, for want of samples."""
        return 0 < self.spared_passes == self.passes

    def ballot(self, steps: Steps, weight: float, busy_ns: int, flags: int) -> vote.Ballot:
        watch = steps.memory.watch if steps.memory is not None else None
        times = (steps.times.seen, steps.times.waited) if busy_ns else (0, 0)
        now = (self.samples, self.total, self.batches, busy_ns, *times)
        samples, total, batches, busy_ns, seen_ns, waited_ns = _added(self._untold, now)
        return vote.Ballot(
            backward=self.backwards,
            step=steps.step,
            samples=samples,
            total=total,
            busy_seconds=busy_ns / 1e9,
            loss=self.loss.sum,
            weight=weight,
            enabled=_bits(steps.syncs, "enabled"),
            fired=_bits(steps.syncs, "fired"),
            refired=_bits(steps.syncs, "refired"),
            checksum=self.checksum,
            buffers=steps.buffers.checksum(self.changed) if steps.buffers is not None else 0,
            flags=flags,
            batches=batches,
            cap=-1 if watch is None else watch.cap,
            room=vote.UNKNOWN if watch is None else watch.room,
            growth=0.0 if watch is None else watch.growth,
            parameters=self.parameters or 0,
            exchange_seconds=steps.times.own_seconds,
            micro_batch=steps.micro_batch[0],
            piece_samples=steps.micro_batch[1],
            changed=_bits(steps.syncs, "changed"),
            drawn=self._drawn + self.batches,
            pass_seconds=(seen_ns + waited_ns) / 1e9 if waited_ns else 0.0,
        )


def _added(one: _Counts, other: _Counts) -> _Counts:
    return tuple(map(sum, zip(one, other)))  # type: ignore[return-value]


def _bits(syncs: list[GradientSync], which: str) -> int:
    """Of those that are exchanged."""
    return sum(1 << i for i, sync in enumerate(syncs) if sync.enabled and getattr(sync, which))
