"""Passes of ranks that train on their own (es.LocalSGD, es.DiLoCo) in which no rank hears of another: the vote comes with their
synchronisation, and says what happened since. Where something needs a vote in every step, there is none of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evenstep import vote

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync
    from evenstep.steps import Steps


class QuietPasses:
    """Of one session's steps. `allowed`: whether nothing that this rank uses needs a vote in every step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.allowed: Callable[[], bool] = lambda: False
        self.agreed = False  # by all ranks, in the last vote
        self.open = False  # one was made since the last commit
        self.last = False  # the last pass was one
        self._voted = 0  # the step of the last vote
        self._passes = 0  # of these since then, or since the last commit
        self._failed = False  # one raised an error before it made a gradient, since the last vote
        self._bad = False  # the loss of the last one was not finite
        # whose optimizers used the gradients of such a one, and no step has said so: the step whose vote told it
        self._held: dict[GradientSync, int | None] = {}

    @property
    def comes(self) -> bool:
        """Whether the pass under way is one; the same on all ranks that make the same passes and steps."""
        if not self.agreed or self._steps.step <= self._voted:  # all passes of a step that has a vote have one
            return False
        since = max(self._steps.step - self._voted, self._passes)
        alone = [sync.local for sync in self._steps.syncs if sync.local is not None]
        due = any(local.due or since >= local.mode.every for local in alone)
        return bool(alone) and not due and self._alone

    @property
    def rare(self) -> bool:
        """Whether votes are as rare as synchronisations."""
        return self.agreed and any(sync.local is not None for sync in self._steps.syncs)

    @property
    def _alone(self) -> bool:
        """Whether no rank waits for gradients of another in the pass under way."""
        late = self._steps.late
        able = late is not None and late.able  # its gradients travel, and no rank waits for them
        return able or all(sync.local is not None or not sync.enabled for sync in self._steps.syncs)

    def made(self, bad: bool) -> None:
        """bad: its loss was not finite."""
        self._passes += 1
        self.open = self.last = True
        self._bad = bad

    def fails(self) -> None:
        """Before it made a gradient; nobody waits for it."""
        self._passes += 1
        self._failed = True

    def steps_on(self, ids: set[int]) -> None:
        """An optimizer of these parameters (ids) does, on what the last one left: what is not finite there is told in the next
        vote."""
        alone = [sync for sync in self._steps.syncs if sync.local is not None]
        its = [sync for sync in alone if sync.has_any(ids)]
        if self._bad:
            self._held.update(dict.fromkeys(its or alone))
        for sync in its:
            if sync.local is not None:
                sync.local.steps_on_nonfinite()

    def said(self, ids: set[int]) -> None:
        """A step of an optimizer of these parameters (ids), after a vote, has said what was not finite."""
        its = [sync for sync in self._steps.syncs if sync.has_any(ids)]
        for sync in its:
            self._held.pop(sync, None)
            if sync.local is not None:
                sync.local.said_nonfinite()

    def commits(self) -> None:
        self._passes, self.open = 0, False

    # -- the vote --

    def flags(self, loss_bad: bool, buffers_changed: bool) -> int:
        """Of this rank's ballot."""
        step = self._steps.step
        for sync, told in list(self._held.items()):
            if told not in (None, step):  # its optimizers make no steps any more, and say nothing
                del self._held[sync]
            elif sync.fired:
                self._held[sync] = step
        flags = vote.LOSS if loss_bad or any(sync.fired for sync in self._held) else 0
        flags |= vote.FAILED_BEFORE if self._failed else 0
        return flags | (0 if self._alone and not buffers_changed and self.allowed() else vote.VOTES)

    def heard(self, ballots: Sequence[vote.Ballot]) -> None:
        self.agreed = not any(ballot.flags & vote.VOTES for ballot in ballots)
        self._voted, self._passes = self._steps.step, 0
        self.open = self.last = self._failed = self._bad = False
