"""What this rank tells in the vote of a pass beside its work, and what it makes of the ranks' ballots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstep import vote
from evenstep.failed_pass import FailedPass, no_gradient
from evenstep.nonfinite import UNNAMED
from evenstep.unshared import Unshared

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync
    from evenstep.loading_ahead import Lead
    from evenstep.step_part import StepPart
    from evenstep.steps import Steps


class StepVotes:
    """Of one session's steps; `part`: this rank's of the one under way."""

    def __init__(self, steps: Steps, part: StepPart, failure: FailedPass) -> None:
        self._steps, self._part, self._failure = steps, part, failure
        self._unshared = Unshared()

    @property
    def _local(self) -> list[GradientSync]:
        return [sync for sync in self._steps.syncs if sync.enabled and sync.local is not None]

    @property
    def _leads(self) -> list[Lead]:
        return [loader.lead for loader in self._steps.loaders.values() if loader.train]

    def flags(self, weight: float) -> int:
        """Of this rank's ballot, at the end of a pass."""
        steps, part = self._steps, self._part
        part.changed = steps.buffers.changed() if steps.buffers is not None else []
        flags = vote.WANTS_CHECKPOINT if steps.wants_checkpoint else 0
        flags |= vote.SPARED if part.spared else 0
        flags |= steps.quiet.flags(part.loss.bad, bool(part.changed))
        finite = [sync.look_at_own(counts=weight > 0) for sync in self._local]  # each, also after one that is not
        if not all(finite):
            flags |= vote.GRADIENT
        checks = None if steps.quiet.rare else steps.parameters
        part.parameters = checks.sum_when_due() if checks is not None else None
        flags |= 0 if part.parameters is None else vote.CHECKED
        flags |= max((lead.needed for lead in self._leads), default=0) << vote.LEAD
        flags |= vote.ENDS if steps.group.rank == 0 and steps.telemetry.asks_end else 0
        flags |= steps.recovery.asks if steps.recovery is not None and steps.group.rank == 0 else 0
        return flags

    def late_ballot(self, weight: float, busy_ns: int) -> vote.Ballot:
        """Of one that is heard later."""
        steps = self._steps
        flags = self.flags(weight)
        steps.passes(busy_ns)
        ballot = self._part.ballot(steps, weight, busy_ns, flags)
        steps.loss_ranks, self._part.loss.bad = [], False
        return ballot

    def check(self, ballots: list[vote.Ballot], taken: str = "") -> None:
        """Raises EvenstepError where the ranks are not in step, or cannot use their gradients."""
        failed = vote.failed(ballots)
        if failed:
            self._failure.breaks(f"backward failed on rank {failed[0]}", all_know=True)
            raise vote.refuse_failed(failed, self._steps.group.rank)
        took = vote.took(ballots)
        if took:
            raise no_gradient(taken or f"a gradient of rank {took[0]} was gone when backward ended")
        vote.check(ballots)

    def hear(self, ballots: list[vote.Ballot]) -> None:
        """Of ranks that are in step. Collective where they have different parameters."""
        steps = self._steps
        steps.ballots = ballots
        self._hear_of_nonfinite(ballots)
        steps.quiet.heard(ballots)
        self._unshared.heard(ballots, steps.loaders.values(), steps.group.rank, at_work=steps.plan is not None)
        if steps.parameters is not None and all(ballot.flags & vote.CHECKED for ballot in ballots):
            steps.parameters.heard(ballots)
        for lead in self._leads:  # also those of which nothing comes now, so that who joins has heard the same
            lead.heard(ballots)
        if steps.memory is not None:
            steps.memory.heard(ballots)
        asked = steps.late is None or ballots[0].step >= steps.late.asked_from
        steps.checkpoint_agreed = asked and bool(ballots[0].flags & vote.WANTS_CHECKPOINT)
        steps.end_agreed = bool(ballots[0].flags & vote.ENDS)
        if steps.recovery is not None:
            steps.recovery.heard(ballots[0].flags)

    def _hear_of_nonfinite(self, ballots: list[vote.Ballot]) -> None:
        self._part.loss.bad = False
        self._steps.loss_ranks = vote.not_finite(ballots, vote.LOSS)
        if vote.not_finite(ballots, vote.GRADIENT):
            for sync in self._local:
                sync.nonfinite = sync.nonfinite or [(UNNAMED, False)]
