"""Process sets under `--recovery shrink`: where a rank of one is lost its others go on without it, and the other sets train on.

The agent's generations are those of all ranks of the job. Of these a set's are the ones in which one of its own ranks went, under the
same numbers; and each of its sessions has a recovery of its own. The session of all ranks trains nothing then: its calls wait for
sets that still train, whatever they lose.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from evenstep import _core
from evenstep.errors import error_of
from evenstep.generation_limits import LACKS, NO_MODEL
from evenstep.generation_told import name
from evenstep.generations import Recovery
from evenstep.mended_group import MendedGroup

if TYPE_CHECKING:
    from evenstep.session import Session

Sets = Mapping[str, Sequence[int]]
"""The ranks of each set of the job, by their numbers in the job."""

_boards: dict[str, SetBoard] = {}
"""Of this rank's sets, by their names."""


class SetBoard:
    """The memory that the agent shares with all ranks (_core.Generation), as those of one set see it."""

    wished = 0
    takes_in = False

    def __init__(self, whole: Recovery, sets: Sets, mine: str) -> None:
        self._whole, self.job = whole, _memory_of(whole)
        self.job_rank, self.first = whole.job_rank, whole.number  # the generation in which the set was made
        self.sets, self.set_ranks = sets, tuple(sets[mine])
        self._taken = 0
        self._doubted: int | None = None  # the job's generation in which this rank said that it waits for a newer one

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.job, attribute)

    @property
    def number(self) -> int:
        return max(self.job.number_of(self.set_ranks), self._taken)

    def _take(self, after: int) -> None:
        """The set's first groups meet at the job's store, which rank 0 keeps. Where that is gone, and this rank waits for another
        generation, it is the one in which rank 0 went, though none of the set's own did."""
        gone = self.job.number_of((0,))  # looked at first: what concerns the set may come in between
        if self.job.number_of(self.set_ranks) <= self.first and gone > max(after, self.first):
            self._taken = gone

    def wait(self, after: int, seconds: float) -> int:
        newest = self.job.number
        if self.number <= after:
            self._take(after)
        if self.number <= after:
            if self._doubted not in (None, newest):  # of the job there is a newer one, of the set there is none
                self.doubt(self.job_rank, after)
            self.job.wait(newest, seconds)
        if self.number > after:
            self._doubted = None
        return self.number

    def doubt(self, rank: int, _: int) -> None:
        self._doubted = self.job.number  # the agent knows no others
        self.job.doubt(rank, self._doubted)

    def has(self, rank: int, number: int) -> bool:
        newest = self.job.number
        unchanged = self.job.number_of(self.set_ranks) <= number  # since then, which may be long ago
        return rank in self.set_ranks and self.job.has(rank, newest if unchanged else number)

    def say(self, rank: int, why: str) -> None:
        """What hinders this rank in any of its sessions is what the agent hears."""
        self.job.say(rank, self._whole.hindrance or why)

    def over(self, number: int) -> _core.Over:
        return self.job.over(number, self.set_ranks)

    def meet(self, number: int, port: int) -> None:
        self.job.meet_at(self.job_rank, number, port)

    def port(self, number: int, seconds: float) -> tuple[str, int]:
        first = next(rank for rank in self.set_ranks if self.has(rank, number))
        return "", self.job.port_at(first, number, self.job.number, seconds)


class SetRecovery(Recovery):
    """Of the session of a process set on this rank."""

    def __init__(self, session: Session, board: SetBoard) -> None:
        super().__init__(session, board, board.job_rank)
        self.number, self.members = board.first, list(board.set_ranks)
        self._board = board
        self._looked, self._told = board.first, set[str]()  # the job's generation, and the lost sets, that were seen
        self.say(NO_MODEL)

    def _has_committed(self) -> None:
        super()._has_committed()
        newest = self._board.job.number
        if newest != self._looked:
            self._looked = newest
            self._tell_lost_sets(newest)

    def _tell_lost_sets(self, number: int) -> None:
        """The first rank of those left in any set does."""
        board = self._board
        living = [rank for rank in range(board.job.ranks) if board.job.has(rank, number)]
        first = min((rank for ranks in board.sets.values() for rank in ranks if rank in living), default=-1)
        for which, ranks in board.sets.items():
            if which in self._told or any(rank in living or board.job.left(rank) for rank in ranks):
                continue
            self._told.add(which)
            if first == board.job_rank:
                words = f"process set {which!r} is lost with {name(ranks, '')}: nobody trains its model any more"
                self._session.telemetry.event(_core.EVENT_MESSAGE, self._session.step, 0, words)
                sys.stderr.write(f"evenstep: {words}\n")


def refuse_after_loss(whole: Session) -> None:
    """Raises, on all ranks alike, where a set can be made no more."""
    if whole.recovery is not None and whole.recovery.has_lost:
        what = "es.ProcessSet after a rank was lost: its numbers are no longer those that the sets of the job have"
        raise error_of("EVEN_ERR_PEER_LOST", what, "make all sets before the first training begins")


def train_apart(whole: Session, sets: Sets, mine: str) -> None:
    """All sets of the job are known, mine is one that this rank is in, and opens next ("": none): whether each goes on by itself, the
    same on all ranks."""
    recovery = whole.recovery
    if recovery is None:
        return
    why = _why_not(whole, sets)
    if why:
        recovery.say(why)
        return
    if not recovery.beside_sets:
        recovery.beside_sets = True
        _memory_of(recovery).train_apart()
        atexit.register(_leave, recovery, os.getpid())
    if mine:
        _boards[mine] = SetBoard(recovery, sets, mine)


def _why_not(whole: Session, sets: Sets) -> str:
    assert whole.recovery is not None and isinstance(whole.group, MendedGroup)
    if whole.group.comm.engine != "shm":
        return "it trains in process sets, and not in the memory of one host alone"
    if _memory_of(whole.recovery).takes_in:
        return "it trains in process sets, which no process can join"
    if whole.steps.syncs or whole.loaders:
        return "it trains in process sets, and with all ranks beside them"
    inside = [rank for ranks in sets.values() for rank in ranks]
    return "it trains in process sets that share ranks" if len(inside) > len(set(inside)) else ""


def leave_word_to_sets(whole: Session) -> None:
    """A set of this rank is open, or it is in none: from now on its sets say whether it could go on without others."""
    recovery = whole.recovery
    if recovery is None or not recovery.beside_sets or recovery.hindrance not in ("", *LACKS):
        return
    if _boards:
        recovery.keep_silent()
    else:
        recovery.say("")


def recovery_of_set(session: Session) -> Recovery | None:
    """None where the set's ranks cannot go on without one of them."""
    board = _boards.get(session.name)
    return None if board is None else SetRecovery(session, board)


def _memory_of(whole: Recovery) -> _core.Generation:
    return cast("_core.Generation", whole.memory)


def _leave(recovery: Recovery, process: int) -> None:
    if os.getpid() == process:
        _memory_of(recovery).leave(recovery.job_rank)
