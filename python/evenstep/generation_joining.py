"""A process that takes a lost rank's place, or comes beside the others: the state of training that a living rank gives it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.call_results import Packs, packed, told_result
from evenstep.checkpoint_state import capture
from evenstep.exchange_state import own_exchange
from evenstep.generation_gift import Gift, gift_lacks, gift_seconds
from evenstep.generation_passes import Passes
from evenstep.mended_group import is_lost
from evenstep.regrouping import timings_of
from evenstep.rendezvous import Overtaken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenstep.session import Session
    from evenstep.set_generations import SetBoard

LOOK_SECONDS = 0.1  # between two looks at signals, while it waits
_LOOK_FOR_GIFT_SECONDS = 0.002


class Joins(Passes):
    """Both sides of it, on this rank."""

    def __init__(self, session: Session, memory: _core.Generation | SetBoard, job_rank: int | None = None) -> None:
        """job_rank: of this rank in the job; None: as in the session."""
        super().__init__()
        self._session, self._memory = session, memory
        self._job_rank = session.environment.rank if job_rank is None else job_rank
        self.number = 0  # the generation that this rank is in
        self.members: Sequence[int] = []  # of it, by their numbers in the job
        self._said: str | None = None
        self._result: Packs = bytes  # of the last call
        self._left: dict[int, list[Any]] = {}  # timings of ranks that were lost, for who takes their place
        self.done = (0, 0)  # up to which steps those that gave the state had made checkpoints (Session.checkpointed)
        self._gift = -1  # the descriptor of the state for those that join
        self.joining = session.environment.joins  # it takes a lost rank's place, and has not met the others yet

    def take_place(self) -> Gift | None:
        """Of a process that takes a lost rank's place, once it could train: waits until the others stand between two
        steps, and gives their state. None where it has joined, or cannot train yet."""
        if not self.joining or self._said != "" or self._committed:
            return None
        self._memory.offer(self._job_rank)
        awaited, since = -1, 0.0
        with self._session.steps.phases.during(_core.AT_COLLECTIVE):
            while True:
                number = self._memory.number
                if self._memory.refused:
                    raise ended()
                if self._memory.has(self._job_rank, number):
                    if number != awaited:
                        awaited, since = number, time.monotonic()
                    gift = self._open_gift(number)
                    if gift is not None:
                        break
                    if time.monotonic() - since > gift_seconds():
                        elder = self._elder_than_this(number)
                        raise gift_lacks(self._job_rank, elder, any(self._memory.process(rank) for rank in elder))
                    self._memory.wait(number, _LOOK_FOR_GIFT_SECONDS)
                else:
                    self._memory.wait(number, LOOK_SECONDS)
        self._committed, self._pass, self._calls, result, self.members, self._left, self.done = gift.place
        self._result = packed(result)
        self._turns = 1  # its next batch begins a pass
        self.number = number - 1
        return gift

    def _open_gift(self, number: int) -> Gift | None:
        given: tuple[int, int] | None = self._memory.given(number)
        if given is None:
            elder = self._elder_than_this(number)
            if not elder:
                raise ended()
            why = self._memory.ungiven(number)
            if why is not None and self._memory.number == number:
                near = any(self._memory.process(rank) for rank in elder)
                raise EvenstepError(
                    f"rank {self._job_rank} cannot take a lost rank's place: the state of the training did not come from "
                    f"another {'rank' if near else 'host'}: {why}\n"
                    f"  fix: see that this host has memory for it{'' if near else ', and that the hosts reach one another'}"
                )
            return None
        try:
            gift = Gift.open(*given, number)
            self._memory.take(self._job_rank, number)
            return gift
        except (EvenstepError, OSError):
            return None  # its giver has ended: another generation comes

    def _elder_than_this(self, number: int) -> list[int]:
        """The members that were so before this process became one: those that have a state."""
        before = number
        while before > 0 and self._memory.has(self._job_rank, before):
            before -= 1
        return [rank for rank in self._members_of(number) if self._memory.has(rank, before)]

    def _members_of(self, number: int) -> list[int]:
        return [rank for rank in range(self._memory.ranks) if self._memory.has(rank, number)]

    def _give(self, number: int) -> None:
        """On each host the first of those that stand gives the state to those of this host that are new in this generation; the
        agents bring it to hosts where nobody has it."""
        new = [rank for rank in self._members_of(number) if rank not in self.members]
        if self.joining or not new:
            return
        first = next(
            (rank for rank in self._members_of(number) if rank in self.members and self._memory.process(rank)), None
        )
        gives_here = first == self._job_rank and any(self._memory.process(rank) for rank in new)
        if not gives_here and not self._memory.gives_away(self._job_rank, number):
            return
        self._drop_gift()
        try:
            with self._session.steps.phases.during(_core.AT_SCRIPT):  # it waits for nobody, and may hang
                self._gift = self._wrap(number)
        except Exception as error:  # of the script's own objects, too: who waits for it ends, and the others go on
            if isinstance(error, Overtaken) or is_lost(error):
                raise
            words = f"rank {self._job_rank} cannot give it: {type(error).__name__}: {error}"
            self._memory.fail_giving(number, " ".join(words.replace("\0", "").split()))
            return
        self._memory.give(self._job_rank, number, self._gift)

    def _wrap(self, number: int) -> int:
        session = self._session
        session.exchange_state = own_exchange(session)
        try:
            snapshot = capture(session, [], session.user_state)
        finally:
            session.exchange_state = {}
        for saved in snapshot.state["loaders"].values():
            saved["speeds"] = {}  # are of the ranks that are to be: told when all meet
        place = (self._committed, self._pass, self._calls, told_result(self._result), self.members, self._timings())
        return Gift.wrap(snapshot, (*place, (session.checkpointed, session.in_memory)), number)

    def _timings(self) -> dict[int, list[Any]]:
        """What was measured of each rank, by their numbers in the job, those that were lost among them."""
        return {**self._left, **({} if self.joining else timings_of(self._session, self.members))}

    def _drop_gift(self) -> None:
        gift, self._gift = self._gift, -1
        if gift >= 0:
            os.close(gift)


def ended() -> EvenstepError:
    return EvenstepError("the others do not go on, so nobody can join them (EVEN_ERR_REVOKED)")
