"""Where a rank is in its passes over the batches, and which of them count nothing since a rank was lost.

A pass is what the script makes of the batches from one fetch to the next after an optimizer's step, a turn one step on gradients of
its own: two in a GAN. Each turn is committed by itself. Where one is void, all that follow in the pass are; and when it is made
again, those that were committed are passed over.
"""

from __future__ import annotations

from evenstep._core import EvenstepError
from evenstep.generation_told import Turn


class Passes:
    def __init__(self) -> None:
        self._committed = self._passes = self._calls = 0  # even_position
        self._void_passes = 0  # from where it stands: the first so many
        self._turns = 0  # of the pass under way, those that are behind it
        self._done = 0  # the same that are committed, now or when the pass was made before
        self._over = 0  # the same, from before: they are passed over
        self._void_seen = False  # one that is behind it is void
        self._pass = 0  # the number of the pass under way
        self._begun = False  # something of the next turn
        self._void_in: int | None = None  # the pass that is void, where somebody has begun it
        self._closures = 0  # begun in the turn under way
        self._due: dict[Turn, int] = {}  # of turns that are void: how many must be
        self.part_gone: bool | None = (
            None  # since the last loop began: a rank with a part of what it gave was lost; None: none has
        )
        self.redoing = False  # the last optimizer.step() applied nothing, and no batch has come since

    @property
    def void(self) -> bool:
        """Whether the turn under way counts nothing, and each rank makes it by itself."""
        return self._passes < self._void_passes

    @property
    def passes_over(self) -> bool:
        """Whether the turn under way was committed when the pass was made before: all make it again, since what it computes may be
        used by those that follow, and nothing of it is applied."""
        return self._turns < self._over

    @property
    def comes_again(self) -> bool:
        """Whether the pass under way will be made again."""
        return self._void_seen

    @property
    def pass_number(self) -> int:
        """Of the pass under way; made again it keeps its number."""
        return self._pass

    @property
    def in_pass(self) -> bool:
        """Whether a batch has come since the last step."""
        return self._pass > 0 and self._turns == 0

    @property
    def at_rest(self) -> bool:
        """Whether nothing was begun since the last step that stands."""
        return not (self._begun or self.in_pass or self._passes or self._void_seen)

    @property
    def committed(self) -> int:
        """Turns that stand."""
        return self._committed

    def begins_pass(self) -> bool:
        """A batch arrives: whether another pass begins with it."""
        self._begun, self.part_gone = True, False
        if not self._turns and self._pass:
            return False
        if self._void_seen:  # the loop was left
            self._passes += 1
        self._pass += 1
        self._turns = self._done = self._over = self._closures = 0
        self._void_seen = False
        return True

    def fetches_void(self) -> bool:
        """A batch is fetched, in a call that all ranks make: whether the pass that it is of counts nothing, and each fetches by
        itself."""
        if self._void_seen:  # the loop was left, and the batch begins another pass
            self._passes += 1
            self._void_seen = False
        return self.void

    def pass_comes_again(self) -> None:
        self._passes += 1
        self._turns, self._over, self._closures = 0, self._done, 0
        self._void_seen = False

    def turn_ended(self, counts: bool) -> None:
        self._void_seen = self._void_seen or (self.void and not counts)
        self._turns += 1
        self._closures = 0
        self.redoing = not counts

    def _commits(self) -> None:
        """The turn under way stands."""
        self._committed += 1
        self._done += 1
        self._passes = self._void_passes = 0
        self._begun, self._void_in = False, None
        self._due = {}

    def begins_turn(self) -> None:
        self._begun = True

    def norm_runs(self) -> bool:
        """A BatchNorm of all ranks in training: whether by itself, in a turn that counts nothing. Raises EvenstepError where the
        others have done so with a rank that is lost."""
        self._begun = True
        if self.void and self._void_in not in (None, self._pass):
            raise EvenstepError(
                "a rank was lost in a step, and a BatchNorm runs in training after it: the others have done so with that rank "
                "(EVEN_ERR_PEER_LOST)\n  fix: run it in eval mode after optimizer.step()"
            )
        return self.void

    # -- optimizers that are given a closure --

    def begins_closure(self) -> None:
        self._closures += 1

    @property
    def closes_enough(self) -> bool:
        """Whether the turn under way counts nothing, and as many closures were begun in it as on the other ranks, which may wait for
        one another in them."""
        if not self.void:
            return self.passes_over and self._closures > 0
        return self._closures >= max(1, self._due.get((self._passes, self._turns), 0))

    def _hear_of_closures(self, due: dict[Turn, int]) -> None:
        """What the members of a new generation have begun."""
        for turn, count in due.items():
            self._due[turn] = max(count, self._due.get(turn, 0))
