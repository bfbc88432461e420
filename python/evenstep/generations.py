"""Going on without ranks that were killed (`evenstep run --recovery shrink`): the others keep their processes.

The agent makes a new generation when a rank's process ends (evenstep._core.Generation); its members open new groups, tell one
another where they stand, and agree (src/fault/agree.h). Each step ends with a meeting that commits it. A pass of a step
that nobody committed is void: backward stays on its rank, optimizer.step() applies nothing, and the loader gives the
batches since the last step again, shared out among those that are left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from evenstep import _core, vote
from evenstep._core import EvenstepError
from evenstep.backward import in_backward
from evenstep.call_results import Packs, packed, told_result
from evenstep.errors import error_of
from evenstep.generation_joining import LOOK_SECONDS, Joins, ended
from evenstep.generation_told import Told, changed, closures_due, not_in_step
from evenstep.group import Bootstrap, SharedGroup, gather_objects
from evenstep.measured_place import host_name
from evenstep.mended_group import MendedGroup, is_lost, part_lost
from evenstep.regrouping import (
    end_torch_groups,
    memory_pool,
    own_adapted,
    own_buckets,
    own_caps,
    own_late,
    own_place,
    own_workers,
    regroup,
)
from evenstep.rendezvous import Overtaken, are_here, has_ended, know, notice_cut, stands_still, stop_grace
from evenstep.shared_states import share_again, take_again
from evenstep.through_torch import goes_through_torch, meet_again

if TYPE_CHECKING:
    from evenstep.mended_hosts import MendedHosts
    from evenstep.session import Session
    from evenstep.set_generations import SetBoard

_PATIENCE_SECONDS = 60.0  # for the agent's word, which comes in milliseconds
_DOUBT_SECONDS = 1.0  # the same while nobody is seen to have ended, or to stand still: one gave up
_ENDED_SECONDS = 1.0  # so long a call goes on beside one that has ended, and may have done its part, before it is lost
_HEED_GAP = 0.5  # looks of one wait lie closer together
_SLOW_SECONDS = 2.0  # who meets the others says then that it waits: one that is not seen here may stand still
_FAR_SECONDS = 10.0  # the same in calls over Gloo, beyond what a straggler takes for a step
_CONNECT_SECONDS = 2.0
_STAND, _SAVE = 1, 2  # even_generation_wish
WITHOUT_MEMORY = "the ranks talk through Gloo, and not all of them have the agent's memory"


class Recovery(Joins):
    """Of the whole job's session on this rank; of a process set's: evenstep.set_generations."""

    def __init__(self, session: Session, memory: _core.Generation | SetBoard, job_rank: int | None = None) -> None:
        super().__init__(session, memory, job_rank)
        speeds, rank = session.environment.speeds, session.environment.rank
        self._speed = speeds[rank] if speeds is not None and rank < len(speeds) else None
        self.beside_sets = False  # sets of its ranks train, and all together nothing: its calls wait for them
        self.members = [r for r in range(memory.ranks) if memory.has(r, 0)]
        self._stands = False  # between two steps, until there is a newer generation
        self.calling = False  # the script is in a call
        self._before_prepare = self._early = False  # which began before es.prepare; and the others can go on from there
        self._unrepeatable = ""  # why no process could take a place: of a call before es.prepare
        self._began = len(self.members)
        self._asks = False  # it needs what each rank gives
        self._failing = 0  # calls that it has not come to, and that fail there
        self._leads = True  # what is in its commit counts as a step of training
        self.undo: Callable[[Sequence[int], Sequence[int], bool], None] | None = (
            None  # of the call under way, before it is made again
        )
        self.has_values = False  # in es.prepare: this rank has what the first one gives to all
        self._asked = 0  # what the agent asks at the end of the step under way, as all heard in its vote:
        self._heard = (0, 0)  # that of this turn, in this generation
        self._heeded = self._doubted = 0.0  # its last look while it waits; seconds for which one has ended, or stands
        self._waits_since, self._waits_at = 0.0, (0, 0, 0)
        session.scheduler_steps.uncertain = lambda: self.can_go_on and not self.at_rest

    # -- before anything is lost --

    def say(self, why: str) -> None:
        """Tells the agent whether this rank could go on without another (""), or why not."""
        if why != self._said:
            self._said = why
            self._memory.say(self._job_rank, why)

    def watch(self, bootstrap: Bootstrap) -> None:
        """The job's first groups: whoever waits in one of them for a rank of another host hears from the agent that it is lost."""
        if not self.joining:
            bootstrap.over = self._memory.over(self.number)

    def keep_silent(self) -> None:
        """Its process sets say it for this rank."""
        self._said = ""

    @property
    def memory(self) -> _core.Generation | SetBoard:
        return self._memory

    @property
    def job_rank(self) -> int:
        """This rank's number in the job, as that began."""
        return self._job_rank

    @property
    def has_lost(self) -> bool:
        """Whether a rank is lost, as far as all heard in the last call."""
        return len(self.members) < self._began

    @property
    def hindrance(self) -> str:
        """Why this rank could not; "" also where it has said nothing yet."""
        return self._said or ""

    @property
    def can_go_on(self) -> bool:
        """Whether this rank could, as far as is known: else nothing needs to be kept for it."""
        return self._said == ""

    # -- the step under way --

    def commit(self, leads: bool = True) -> bool:
        """At optimizer.step(), once this rank has the whole gradients: whether the turn stands, on all ranks alike. leads: it counts
        as a step of training then."""
        self._begun, self._leads = True, leads
        if any(sync.unsynchronised for sync in self._session.steps.syncs):
            self.say("gradients under es.no_sync are kept over the step of another optimizer")
        group = self._session.group
        assert isinstance(group, MendedGroup)
        before = self._committed
        try:
            self._session.steps.synchronise_buffers(SharedGroup(group.comm))
        except EvenstepError as error:
            if not self.mends(error):
                raise
            return False
        self._session.steps.times.meets()
        try:
            group.meet()
        except EvenstepError as error:
            self._mend(error, committing=True)
            return self._committed > before
        self._has_committed()
        return True

    def _has_committed(self) -> None:
        self._commits()
        for sync in self._session.steps.syncs:
            sync.stands()
        if self._session.steps.noise is not None:
            self._session.steps.noise.stands()
        if self._leads:
            self._session.optimizer_steps.book()

    def mends(self, error: BaseException) -> bool:
        """After an error in what a step does before its commit: whether ranks were lost, and those that are left go on. The pass is
        void then. Raises where they cannot go on."""
        if not is_lost(error):
            return False
        assert isinstance(error, EvenstepError)
        self._mend(error)
        return True

    # -- calls outside steps --

    def doubt(self) -> None:
        """This rank waits, and cannot leave, for one that may stand still: the agent ends that one, or sees it go on."""
        self._memory.doubt(self._job_rank, self._memory.number)

    def needs_all(self) -> bool:
        """Whether a figure that the script asks for now has to be that of all ranks: outside the training loop."""
        latest = self._session.latest
        return latest is None or not latest.trains

    def lacks_parts(self) -> bool:
        """In a call that asks for what each rank gives: whether a rank was lost, maybe in another call, outside the training loop and
        since some rank's last loop began. Collective, on all alike."""
        if self.number == 0:
            return False
        lacks = bool(self.part_gone) and self.needs_all()
        return any(map(any, self._session.group.exchange(bytes([lacks]))))

    def needs_places(self, call: str) -> None:
        """What a call gives is asked of each rank, before es.prepare: whoever takes a lost one's place could not make it. So the job
        starts again with all where one is lost there, or was."""
        if self._said is not None or self.joining or self.calling or not self._memory.takes_in:
            return
        self._unrepeatable = f"a process that takes a place could not make the {call} of before es.prepare"
        if len(self.members) < self._began:
            words = f"{call} before es.prepare, after a rank was lost: {self._unrepeatable}, so the job starts again with all"
            raise error_of("EVEN_ERR_PEER_LOST", words, f"call {call} after the first batch, or use --recovery shrink")

    def begin_call(self) -> None:
        if self._failing:
            self._failing -= 1
            raise part_lost()
        self.calling = True
        if self._said is None and not self.joining:
            self._begin_early()

    def _begin_early(self) -> None:
        """A call before es.prepare: nothing is prepared that would have to be as it was before. Who waits in one can go on."""
        from evenstep.generation_limits import why_no_groups

        why = self._unrepeatable or why_no_groups(self._session)
        self._before_prepare, self._early = True, not why
        if why:
            self.say(why)
        else:
            self._memory.say_early(self._job_rank, 1 + self._calls)

    def end_call(self) -> None:
        self.calling = False
        if self._before_prepare:
            self._before_prepare = self._early = False
            self._said = None
            self._memory.say_early(self._job_rank, 0)

    def look(self) -> None:
        """In a long call: raises where a rank was lost meanwhile, so that the others need not wait for its end."""
        if self.calling and not self.joining and self._memory.number != self.number:
            raise error_of("EVEN_ERR_PEER_LOST", "a rank was lost")

    def heed(self) -> None:
        """Raises where this rank waits for one that is lost."""
        if not self.joining:  # one that joins waits by itself
            self.heed_in(self.number, self.members)

    def heed_in(self, number: int, members: Sequence[int]) -> None:
        """The same of a group of this generation's, which the others may just be making."""
        if why := self._why_lost(number, members):
            raise error_of("EVEN_ERR_PEER_LOST", f"another rank was lost: {why}", "the end of its own output says why")

    def _why_lost(self, number: int, members: Sequence[int]) -> str:
        """Of a rank that this one waits for; "": none is. Once a look."""
        if self._memory.number != number:
            return "the others go on without it"
        now, last = time.monotonic(), self._heeded
        self._heeded = now
        at = (self._committed, self._passes, self._calls)  # steps that each wait a little are not one wait
        if now - last >= _HEED_GAP or at != self._waits_at:
            self._waits_since, self._waits_at = now, at
        if now - self._waits_since > _FAR_SECONDS and not are_here(members):
            self._memory.doubt(self._job_rank, number)
        ended = has_ended(members)  # which may have given all its part: then the call soon ends
        if not ended and not stands_still(members):
            self._doubted = 0.0
            return ""
        # looks that lie apart are of another wait, or this rank stood still itself
        self._doubted += now - last if now - last < _HEED_GAP else 0.0
        if self._doubted < (_ENDED_SECONDS if ended else stop_grace()):
            return ""
        return "its process has ended" if ended else "it was stopped"

    def mend_call(self, error: EvenstepError, asks: Callable[[], bool]) -> bytes | None:
        """After an error in a call: its result where one of those that are left has it; None: they make it again."""
        if not is_lost(error):
            raise error
        self._asks = asks()
        try:
            given = self._mend(error, calling=True)
            self._result = self._result if given is None else packed(given)
            return given
        finally:
            self._asks = False

    def call_ended(self, result: Packs) -> None:
        if self.joining:  # made with nobody
            return
        self._calls += 1
        self._result = result

    # -- between two steps --

    @property
    def asks(self) -> int:
        """Of rank 0, for a vote: what the agent asks of all at the end of this step."""
        return {_STAND: vote.STANDS, _SAVE: vote.STANDS | vote.SAVES}.get(self._memory.wished, 0)

    def heard(self, flags: int) -> None:
        """Rank 0's in the vote."""
        self._asked, self._heard = flags & (vote.STANDS | vote.SAVES), (self._committed + 1, self.number)

    def between_steps(self) -> None:
        """Stands there where the last vote said so, until there is a newer generation: another rank has joined, or was lost."""
        asked, self._asked = self._asked, 0
        if not asked:
            return
        began, (_, number) = time.monotonic(), self._heard
        if asked & vote.SAVES:
            self._session.checkpoint_now()
        self._session.synchronise_models()  # who joins gets what all have alike
        if self.number != number:  # a rank was lost meanwhile: they are asked again
            return
        self._memory.stand(self._job_rank, self.number)
        self._stand(self.number, began)

    def _stand(self, number: int, began: float) -> None:
        self._stands = True
        try:
            with self._session.steps.phases.during(_core.AT_COLLECTIVE):
                self._regenerate(number, None, began)
        finally:
            self._stands = False
            self._drop_gift()

    def arrive(self) -> None:
        """Before the first batch: meets the others, which stand between the two steps whose state this rank has."""
        if not self.joining:
            return
        if not self._committed:
            raise EvenstepError(
                f"this process cannot take the place of a lost rank: {self._said or 'it could not train'}\n"
                "  fix: leave --recovery replace out"
            )
        self._stand(self.number, time.monotonic())
        self.joining = False

    # -- a new generation --

    def _mend(self, error: EvenstepError, calling: bool = False, committing: bool = False) -> bytes | None:
        began = time.monotonic()
        self._revoke()
        if self._said is None and not self._early:
            self.say("it has not come to es.prepare")
        if self._said != "" and not self._early:
            self._before_prepare = False  # what it said stays
            raise error
        return self._regenerate(self.number, error, began, calling, committing)

    def _regenerate(
        self,
        tried: int,
        error: EvenstepError | None,
        began: float,
        calling: bool = False,
        committing: bool = False,
    ) -> bytes | None:
        """error: for which it is done; None: it stands between two steps, for as long as that takes."""
        failed = error is not None
        while True:
            if failed:
                self._memory.doubt(self._job_rank, tried)
            tried = self._newer(tried, error)
            try:
                self._give(tried)
                comm, told = self._meet(tried)
                return self._go_on(tried, comm, told, began, calling, committing)
            except Overtaken:
                continue
            except EvenstepError as again:
                if not is_lost(again):
                    raise
                self._revoke()
                failed = True

    def _revoke(self) -> None:
        session = self._session
        session.group.revoke()
        for sync in session.steps.syncs:
            for engine in sync.engines:
                if hasattr(engine, "revoke"):
                    engine.revoke()
        end_torch_groups()

    def _newer(self, tried: int, error: EvenstepError | None) -> int:
        began = time.monotonic()
        while True:
            number = self._memory.wait(tried, LOOK_SECONDS)
            if number > tried and not self._memory.refused:
                return number
            if self._memory.refused:
                raise error or ended()
            if stands_still(self.members):  # the agent ends it, or sees it go on
                began = time.monotonic()
                continue
            waited = time.monotonic() - began
            patience = _DOUBT_SECONDS if are_here(self.members) else far_doubt()
            doubts = waited > patience and not has_ended(self.members)
            if error is not None and (doubts or waited > max(_PATIENCE_SECONDS, patience)):
                raise error

    def _meet(self, number: int) -> tuple[_core.Comm | MendedHosts, list[Told]]:
        """The new control group, and where its members stand."""
        members = self._members_of(number)
        if self._job_rank not in members:
            raise ended()
        know({rank: self._memory.process(rank) for rank in members})
        session, bootstrap = self._session, self._session.bootstrap
        assert bootstrap is not None
        environment = replace(session.environment, rank=members.index(self._job_rank), world_size=len(members))
        look = partial(self._look_for_newer, number, time.monotonic() + _SLOW_SECONDS)
        bootstrap.go_on(environment, self._store(number, members), members, number, self._memory.over(number), look)
        comm = bootstrap.lasting("control", partial(self.heed_in, number, members))
        assert comm is not None
        stands = self._stands or ((self.undo is not None or self._early or self.beside_sets) and self.at_rest)
        position = (self.committed, self._passes, self._calls, stands, self._asks)
        place = (session.environment.device, host_name())
        facts = (*place, memory_pool(session), own_caps(session), own_buckets(session), own_workers(session))
        begun = self._pass if self._begun else 0
        turn = (self._passes, self._turns, self._closures)
        ways = [goes_through_torch(sync.engine) for sync in session.steps.syncs]
        now = (own_place(session), turn, own_late(session), own_adapted(session), self.has_values, ways)
        mine = Told(members, position, begun, told_result(self._result), self._speed, *facts, self._timings(), *now)
        return comm, gather_objects(SharedGroup(comm), mine)

    def _look_for_newer(self, number: int, slow: float) -> None:
        """slow: from then on the agent is told that this rank waits for the others; one that is seen to stand, soon."""
        if self._memory.number != number or self._memory.refused:
            raise Overtaken
        left = slow - time.monotonic()
        seen = 0 < left < _SLOW_SECONDS - LOOK_SECONDS and stands_still(self._members_of(number))
        if (seen or left < 0) and not self._stands:
            self._memory.doubt(self._job_rank, number)

    def _store(self, number: int, members: list[int]) -> Any:
        if len(members) == 1:
            return dist.HashStore()
        if members[0] == self._job_rank:
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_PATIENCE_SECONDS)
            )
            self._memory.meet(number, store.port)
            return store
        until, slow = time.monotonic() + _PATIENCE_SECONDS, time.monotonic() + _SLOW_SECONDS
        while True:
            address, port = self._memory.port(number, LOOK_SECONDS)
            self._look_for_newer(number, slow)
            in_time = self._stands or self.beside_sets or time.monotonic() <= until
            if not in_time:  # who joins, or trains in a set, may take its time: the agent sees its end
                raise Overtaken
            if not port:
                continue
            try:
                timeout = timedelta(seconds=_CONNECT_SECONDS)
                store = dist.TCPStore(address or "127.0.0.1", port, is_master=False, timeout=timeout)
            except RuntimeError:
                continue  # its host is late, or has ended: then another generation comes
            if address:
                notice_cut(address, port)
            return store

    def _go_on(
        self,
        number: int,
        comm: _core.Comm | MendedHosts,
        told: list[Told],
        began: float,
        calling: bool,
        committing: bool,
    ) -> bytes | None:
        """All members have told where they stand: the same on all from here on."""
        session, bootstrap = self._session, self._session.bootstrap
        assert bootstrap is not None
        members = told[comm.rank].members
        committed, voids, calls, giver, fails = _core.agree([one.position for one in told])
        if (committed > self._committed and not committing) or (calls > self._calls and not calling):
            raise not_in_step()
        given = told[giver].result
        if isinstance(given, str):
            if any(one.position[2] < calls for one in told):  # on all ranks alike
                self.say(given)
                raise EvenstepError(
                    f"{given}\n  fix: copy what es.gather and es.evaluate give before changing it in place"
                )
            given = b""  # they all have it
        undone = self.undo is not None and calls == self._calls
        if self.undo is not None and undone:
            self.undo(self.members, members, told[0].has_values)
        met = meet_again(session, bootstrap, comm, told)
        sharing = share_again(session, SharedGroup(comm))
        before = self.members
        begun = {one.begun for one in told if one.begun and one.position[0] == committed}
        if len(begun) > 1:
            raise not_in_step()
        if committed > self._committed:
            self._has_committed()  # as those did that came out of the meeting, among all who were in it
        result = given if calls > self._calls else None
        fails_here = fails and calling and calls == self._calls
        self._failing += 1 if fails and not fails_here else 0
        if fails or (self.part_gone is False and self.needs_all() and not set(before) <= set(members)):
            self.part_gone = not fails
        known = {} if undone else told[0].timings  # of loaders that are prepared again
        self._left = {rank: timings for rank, timings in known.items() if rank not in members}
        self._void_passes = voids
        if self._heard[0] != committed:  # else all have heard it who made that turn, and some may be at it
            self._asked = 0
        if voids:
            session.pass_state.want()
        self._void_in = next(iter(begun), None)
        self._calls = calls + 1 if fails else calls
        self.number, self.members = number, members
        group = session.group
        assert isinstance(group, MendedGroup)
        group.take(comm)
        self._hear_of_closures(closures_due(told, committed))
        regroup(session, bootstrap.environment, met, told, committed)
        take_again(session, *sharing)
        bootstrap.met()
        if voids == 0:
            session.forget_pass()  # all begin the step alike
        elif in_backward():
            for sync in session.steps.syncs:
                sync.idle = True
        self._tell(number, before, began)
        if fails_here:
            raise part_lost()
        return result

    def _tell(self, number: int, before: Sequence[int], began: float) -> None:
        session = self._session
        gone = [rank for rank in before if rank not in self.members]
        new = [rank for rank in self.members if rank not in before]
        if session.rank == 0 and (gone or new) and not self.beside_sets:  # these have told
            words = changed(number, gone, new, self.members, time.monotonic() - began)
            session.telemetry.event(_core.EVENT_GENERATION, session.step, number, words)
        lost = [words for sync in session.steps.syncs for words in sync.lost_with(gone)] if gone else []
        for words in lost if session.rank == 0 else ():
            session.telemetry.event(_core.EVENT_MESSAGE, session.step, 0, words)
            sys.stderr.write(f"evenstep: {words}\n")


def host_timeout() -> float:
    """Seconds after which the agents take a silent host for lost; they have checked the variable."""
    return float(os.environ.get("EVENSTEP_HOST_TIMEOUT") or 4)


def far_doubt() -> float:
    """What _DOUBT_SECONDS is where some are on other hosts: longer than these are silent before they are lost (S), another leader is
    found (3/8 S, an election of at most S/2) and has gathered those that are left (8 s)."""
    return max(15.0, 7.5 + 1.875 * host_timeout())


def open_recovery(session: Session) -> Recovery | None:
    """None where the launcher did not ask for it."""
    if session.name:
        from evenstep.set_generations import recovery_of_set

        return recovery_of_set(session)
    fd = session.environment.generation_fd
    if fd < 0:
        return None
    os.environ.pop("EVENSTEP_GENERATION_FD", None)  # for this process, not for those that it starts
    os.environ.pop("EVENSTEP_JOINS", None)
    try:
        memory = _core.Generation(fd)
    except EvenstepError:
        return None  # a wrapper of the script has closed it; the agent restarts then
    os.close(fd)
    return Recovery(session, memory)


def agree_on_recovery(session: Session, has: Sequence[bool]) -> None:
    """has: of each rank, once all have met, whether it has what open_recovery opens. Where some have not, nobody goes on without another:
    who does makes groups in another way, and meets once more in each step. The same on all ranks."""
    lacking = [rank for rank, one in enumerate(has) if not one]
    if not 0 < len(lacking) < len(has):
        return
    who = " and ".join(f"rank {rank} on host {session.hosts[rank]}" for rank in lacking[:3])
    words = f"{who}{' and others' if len(lacking) > 3 else ''}: without the agent's memory (a wrapper closes EVENSTEP_GENERATION_FD)"
    recovery, group, bootstrap = session.recovery, session.group, session.bootstrap
    if recovery is not None:
        assert isinstance(group, SharedGroup) and bootstrap is not None
        recovery.say(words)
        session.group = session.steps.group = SharedGroup(group.comm)
        session.recovery = session.steps.recovery = bootstrap.heed = None
    if session.rank == 0:
        told = f"the job starts again where a rank is lost, whatever --recovery says: {words}"
        sys.stderr.write(
            f"evenstep: {told}\n  fix: let what starts that rank's script keep its variables EVENSTEP_… and its descriptors\n"
        )
