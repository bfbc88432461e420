"""What a rank does of the exchange when a pass has failed on it, or on another, so that none waits for what will not come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from evenstep import vote
from evenstep._core import EvenstepError
from evenstep.group_end import first_line

if TYPE_CHECKING:
    from evenstep.gradients import GradientSync
    from evenstep.steps import Steps


def give_up(syncs: Sequence[GradientSync], begun: int = 0) -> None:
    """What engines exchange of this pass counts nothing on any rank. begun: a bit for each model that others may have handed gradients
    of over."""
    for index, sync in enumerate(syncs):
        if sync.enabled:
            with suppress(RuntimeError):  # why it ends is known
                sync.give_up(bool(begun >> index & 1))


def end_calls(syncs: Sequence[GradientSync], by_others: bool = False) -> None:
    """Where training has ended: who of the ranks could not hand all on is waited for by none. by_others: they hear why, and end theirs."""
    for sync in syncs:
        sync.end_calls(by_others)


def no_gradient(why: str) -> EvenstepError:
    return EvenstepError(
        f"{why}: a hook of yours took it before the ranks had exchanged it (an optimizer inside backward?)\n"
        "  fix: call optimizer.step() after backward; freeze parameters by requires_grad_(False)"
    )


class FailedPass:
    """Of one session's steps: what is known of it, and what the other ranks are told."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.why = ""  # the ranks are no longer in step
        self.begun: int | None = None  # a bit for each model that is to be exchanged yet, since the vote on it

    def check(self) -> None:
        """Raises EvenstepError where the ranks are no longer in step."""
        if self.why:
            raise EvenstepError(
                f"the ranks are no longer in step: {self.why}\n  fix: end the job; it goes on from its checkpoint"
            )

    def breaks(self, why: str, all_know: bool = False) -> None:
        """all_know: votes that are under way tell the others, too."""
        self.why = why
        self._steps.group.revoke(why)
        if self._steps.late is not None and not all_know:
            self._steps.late.revoke()

    def with_gradients(self, error: str) -> None:
        """Backward raised an error of this type once it had made some, or something that ends the script."""
        give_up(self._steps.syncs, begun=-1)
        self.breaks(f"backward failed on rank {self._steps.group.rank} ({error})")
        end_calls(self._steps.syncs, by_others=True)

    def is_everyones(self, error: str, exchange: Callable[[], list[vote.Ballot]]) -> bool:
        """Backward raised an error of this type before it had made some: whether it did so on all ranks. exchange: the vote. Collective."""
        syncs, rank = self._steps.syncs, self._steps.group.rank
        try:
            ballots = exchange()
        except EvenstepError as lost:
            self.breaks(f"backward failed on rank {rank} ({error}), and then {first_line(lost)}")
            end_calls(syncs)
            return False
        failed = vote.failed(ballots)
        if failed:
            give_up(syncs, begun=vote.fired(ballots))
            other = next(one for one in range(len(ballots)) if one not in failed)
            self.breaks(f"backward failed on rank {rank} ({error}), not on rank {other}")
            end_calls(syncs, by_others=True)
        return not failed

    def of_exchange(self, error: BaseException) -> BaseException:
        """What is to be raised where the vote, or what follows it, raised this."""
        revoked = getattr(error, "status", "") == "EVEN_ERR_REVOKED"
        self.why = self.why or first_line(error)
        give_up(self._steps.syncs, -1 if revoked and self.begun is None else self.begun or 0)
        end_calls(self._steps.syncs)
        if not revoked:
            return error
        return EvenstepError(
            f"another rank's backward failed: {first_line(error)}\n  fix: the reason is in that rank's output"
        )
