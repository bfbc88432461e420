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


class StepPart:
    """What counts up does so since the last commit."""

    def __init__(self) -> None:
        self.loss = StepLoss()
        self.changed: list[Change] = []  # buffers
        self.parameters: int | None = None  # their sum, where the vote under way compares it
        self.backwards = 0  # exchanged ones; since the last void pass
        self._begin()

    def _begin(self) -> None:
        self.samples = self.total = self.batches = 0
        self.checksum = 0
        self.passes = self.spared_passes = 0

    def begins_anew(self) -> None:
        """After a commit."""
        self._begin()
        self.loss.sum = 0.0

    def is_void(self) -> None:
        """It comes again."""
        self._begin()
        self.backwards = 0
        self.loss.forget()

    def batch_arrives(self, plan: BatchPlan) -> None:
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
        return vote.Ballot(
            backward=self.backwards,
            step=steps.step,
            samples=self.samples,
            total=self.total,
            busy_seconds=busy_ns / 1e9,
            loss=self.loss.sum,
            weight=weight,
            enabled=_bits(steps.syncs, "enabled"),
            fired=_bits(steps.syncs, "fired"),
            refired=_bits(steps.syncs, "refired"),
            checksum=self.checksum,
            buffers=steps.buffers.checksum(self.changed) if steps.buffers is not None else 0,
            flags=flags,
            batches=self.batches,
            cap=-1 if watch is None else watch.cap,
            room=vote.UNKNOWN if watch is None else watch.room,
            growth=0.0 if watch is None else watch.growth,
            parameters=self.parameters or 0,
            exchange_seconds=steps.times.own_seconds,
            micro_batch=steps.micro_batch[0],
            piece_samples=steps.micro_batch[1],
            changed=_bits(steps.syncs, "changed"),
        )


def _bits(syncs: list[GradientSync], which: str) -> int:
    """Of those that are exchanged."""
    return sum(1 << i for i, sync in enumerate(syncs) if sync.enabled and getattr(sync, which))
