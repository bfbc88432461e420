"""Going on without ranks that were killed (`evenstep run --recovery shrink`): the others keep their processes.

The agent makes a new generation when a rank's process ends (evenstep._core.Generation); its members open new groups, tell one
another where they stand, and agree (src/fault/agree.h). Each step ends with a meeting that commits it. A pass of a step
that nobody committed is void: backward stays on its rank, optimizer.step() applies nothing, and the loader gives the
batches since the last step again, shared out among those that are left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from evenstep import _core, vote
from evenstep._core import EvenstepError
from evenstep.backward import in_backward
from evenstep.call_results import Packs, packed, told_result
from evenstep.checkpoint_state import capture
from evenstep.generation_gift import Gift
from evenstep.group import Bootstrap, SharedGroup, gather_objects
from evenstep.measured_place import host_name
from evenstep.mended_group import MendedGroup, is_lost, part_lost
from evenstep.regrouping import end_torch_groups, memory_pool, own_buckets, own_caps, own_workers, regroup, timings_of
from evenstep.rendezvous import Overtaken, are_here, has_ended, know, notice_cut, stands_still

if TYPE_CHECKING:
    from evenstep.session import Session

_PATIENCE_SECONDS = 60.0  # for the agent's word, which comes in milliseconds
_DOUBT_SECONDS = 1.0  # the same while nobody is seen to have ended, or to stand still: one gave up
_FAR_DOUBT_SECONDS = 11.0  # beyond host_timeout, where some are on other hosts
_SLOW_SECONDS = 2.0  # who meets the others says then that it waits: one that is not seen here may stand still
_LOOK_SECONDS = 0.1  # between two looks at signals, while it waits
_CONNECT_SECONDS = 2.0
_LOOK_FOR_GIFT_SECONDS = 0.002
_STAND, _SAVE = 1, 2  # even_generation_wish
BETWEEN_HOSTS = (
    "the ranks talk through Gloo, which ends no call when a rank is lost, and makes no group of those that are left"
)
"""Why a job cannot go on without a rank where nothing of ours connects its hosts."""


class Recovery:
    """Of the whole job's session on this rank."""

    def __init__(self, session: Session, memory: _core.Generation) -> None:
        self._session, self._memory = session, memory
        self._job_rank = session.environment.rank
        speeds = session.environment.speeds
        self._speed = speeds[self._job_rank] if speeds is not None and self._job_rank < len(speeds) else None
        self.number = 0  # the generation that this rank is in
        self.members = [r for r in range(memory.ranks) if memory.has(r, 0)]  # of it, by their numbers in the job
        self._committed = self._passes = self._calls = 0  # even_position
        self._stands = False  # between two steps, until there is a newer generation
        self._void_passes = 0  # from where it stands: the first so many
        self._turns = 0  # of the pass under way, those that are behind it
        self._done = 0  # the same that are committed, now or when the pass was made before
        self._over = 0  # the same, from before: they are passed over
        self._void_seen = False  # one that is behind it is void
        self._pass = 0  # the number of the pass under way
        self._begun = False  # something of the next turn
        self._void_in: int | None = None  # the pass that is void, where somebody has begun it
        self._result: Packs = bytes  # of the last call
        self.calling = False  # the script is in one
        self._asks = False  # it needs what each rank gives
        self._failing = 0  # calls that it has not come to, and that fail there
        self.redoing = False  # the last optimizer.step() applied nothing, and no batch has come since
        self._leads = True  # what is in its commit counts as a step of training
        self._said: str | None = None
        self._asked = 0  # what the agent asks at the end of the step under way, as all heard in its vote
        self._left: dict[int, list[Any]] = {}  # timings of ranks that were lost, for who takes their place
        self._gift = -1  # the descriptor of the state for those that join
        self.joining = session.environment.joins  # it takes a lost rank's place, and has not met the others yet

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

    @property
    def can_go_on(self) -> bool:
        """Whether this rank could, as far as is known: else nothing needs to be kept for it."""
        return self._said == ""

    # -- the step under way --

    # A pass is what the script makes of the batches from one fetch to the next after an optimizer's step, a turn one step on
    # gradients of its own: two in a GAN. Each turn is committed by itself. Where one is void, all that follow in the pass are; and when
    # it is made again, those that were committed are passed over.

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

    def begins_pass(self) -> bool:
        """A batch arrives: whether another pass begins with it."""
        self._begun = True
        if not self._turns and self._pass:
            return False
        if self._void_seen:  # the loop was left
            self._passes += 1
        self._pass += 1
        self._turns = self._done = self._over = 0
        self._void_seen = False
        return True

    def pass_comes_again(self) -> None:
        self._passes += 1
        self._turns, self._over = 0, self._done
        self._void_seen = False

    def turn_ended(self, counts: bool) -> None:
        self._void_seen = self._void_seen or (self.void and not counts)
        self._turns += 1
        self.redoing = not counts

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
        try:
            group.meet()
        except EvenstepError as error:
            self._mend(error, committing=True)
            return self._committed > before
        self._has_committed()
        return True

    def _has_committed(self) -> None:
        self._committed += 1
        self._done += 1
        self._passes = self._void_passes = 0
        self._begun, self._void_in = False, None
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

    def needs_all(self) -> bool:
        """Whether a figure that the script asks for now has to be that of all ranks: outside the training loop."""
        return not self._session.in_training_loop

    def begin_call(self) -> None:
        if self._failing:
            self._failing -= 1
            raise part_lost()
        self.calling = True

    def look(self) -> None:
        """In a long call: raises where a rank was lost meanwhile, so that the others need not wait for its end."""
        if self.calling and not self.joining and self._memory.number != self.number:
            error = EvenstepError("a rank was lost (EVEN_ERR_PEER_LOST)")
            error.status = "EVEN_ERR_PEER_LOST"  # type: ignore[attr-defined]
            raise error

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
        self._asked = flags & (vote.STANDS | vote.SAVES)

    def between_steps(self) -> None:
        """Stands there where the last vote said so, until there is a newer generation: another rank has joined, or was lost."""
        asked, self._asked = self._asked, 0
        if not asked:
            return
        began, number = time.monotonic(), self.number
        if asked & vote.SAVES:
            self._session.checkpoint_now()
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

    # -- joining --

    def take_place(self) -> Gift | None:
        """Of a process that takes a lost rank's place, once it could train: waits until the others stand between two
        steps, and gives their state. None where it has joined, or cannot train yet."""
        if not self.joining or self._said != "" or self._committed:
            return None
        self._memory.offer(self._job_rank)
        with self._session.steps.phases.during(_core.AT_COLLECTIVE):
            while True:
                number = self._memory.number
                if self._memory.refused:
                    raise _ended()
                if self._memory.has(self._job_rank, number):
                    gift = self._open_gift(number)
                    if gift is not None:
                        break
                    self._memory.wait(number, _LOOK_FOR_GIFT_SECONDS)
                else:
                    self._memory.wait(number, _LOOK_SECONDS)
        self._committed, self._pass, self._calls, result, self.members, self._left = gift.place
        self._result = packed(result)
        self._turns = 1  # its next batch begins a pass
        self.number = number - 1
        return gift

    def _open_gift(self, number: int) -> Gift | None:
        given = self._memory.given(number)
        if given is None:
            elder = self._elder_than_this(number)
            if not elder:
                raise _ended()
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
        snapshot = capture(session, [], session.user_state)
        for saved in snapshot.state["loaders"].values():
            saved["speeds"] = {}  # are of the ranks that are to be: told when all meet
        place = (self._committed, self._pass, self._calls, told_result(self._result), self.members, self._timings())
        return Gift.wrap(snapshot, place, number)

    def _timings(self) -> dict[int, list[Any]]:
        """What was measured of each rank, by their numbers in the job, those that were lost among them."""
        return {**self._left, **({} if self.joining else timings_of(self._session, self.members))}

    def _drop_gift(self) -> None:
        gift, self._gift = self._gift, -1
        if gift >= 0:
            os.close(gift)

    # -- a new generation --

    def _mend(self, error: EvenstepError, calling: bool = False, committing: bool = False) -> bytes | None:
        began = time.monotonic()
        self._revoke()
        if self._said != "":
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
            sync.engine.revoke()  # type: ignore[attr-defined]
        end_torch_groups()

    def _newer(self, tried: int, error: EvenstepError | None) -> int:
        began = time.monotonic()
        while True:
            number = self._memory.wait(tried, _LOOK_SECONDS)
            if number > tried and not self._memory.refused:
                return number
            if self._memory.refused:
                raise error or _ended()
            if stands_still(self.members):  # the agent ends it, or sees it go on
                began = time.monotonic()
                continue
            waited = time.monotonic() - began
            patience = _DOUBT_SECONDS if are_here(self.members) else _FAR_DOUBT_SECONDS + host_timeout()
            doubts = waited > patience and not has_ended(self.members)
            if error is not None and (doubts or waited > _PATIENCE_SECONDS):
                raise error

    def _members_of(self, number: int) -> list[int]:
        return [rank for rank in range(self._memory.ranks) if self._memory.has(rank, number)]

    def _meet(self, number: int) -> tuple[_core.Comm, list[Told]]:
        """The new control group, and where its members stand."""
        members = self._members_of(number)
        if self._job_rank not in members:
            raise _ended()
        know({rank: self._memory.process(rank) for rank in members})
        session, bootstrap = self._session, self._session.bootstrap
        assert bootstrap is not None
        environment = replace(session.environment, rank=members.index(self._job_rank), world_size=len(members))
        look = partial(self._look_for_newer, number, time.monotonic() + _SLOW_SECONDS)
        bootstrap.go_on(environment, self._store(number, members), members, number, self._memory.over(number), look)
        comm = _made(bootstrap.shared(0, "control"))
        position = (self._committed, self._passes, self._calls, self._stands, self._asks)

        place = (session.environment.device, host_name())
        facts = (*place, memory_pool(session), own_caps(session), own_buckets(session), own_workers(session))
        begun = self._pass if self._begun else 0
        mine = Told(members, position, begun, told_result(self._result), self._speed, *facts, self._timings())
        return comm, gather_objects(SharedGroup(comm), mine)

    def _look_for_newer(self, number: int, slow: float) -> None:
        """slow: from then on the agent is told that this rank waits for the others; one that is seen to stand, soon."""
        if self._memory.number != number or self._memory.refused:
            raise Overtaken
        left = slow - time.monotonic()
        seen = 0 < left < _SLOW_SECONDS - _LOOK_SECONDS and stands_still(self._members_of(number))
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
            address, port = self._memory.port(number, _LOOK_SECONDS)
            self._look_for_newer(number, slow)
            if time.monotonic() > until and not self._stands:  # who joins may take its time: the agent sees its end
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
        self, number: int, comm: _core.Comm, told: list[Told], began: float, calling: bool, committing: bool
    ) -> bytes | None:
        """All members have told where they stand: the same on all from here on."""
        session, bootstrap = self._session, self._session.bootstrap
        assert bootstrap is not None
        members = told[comm.rank].members
        committed, voids, calls, giver, fails = _core.agree([one.position for one in told])
        if (committed > self._committed and not committing) or (calls > self._calls and not calling):
            raise _not_in_step()
        given = told[giver].result
        if isinstance(given, str):
            if any(one.position[2] < calls for one in told):  # on all ranks alike
                self.say(given)
                raise EvenstepError(
                    f"{given}\n  fix: copy what es.gather and es.evaluate give before changing it in place"
                )
            given = b""  # they all have it
        engines = []
        for sync in session.steps.syncs:
            engines.append(sync.engine.meet_again(bootstrap))  # type: ignore[attr-defined]
        before = self.members
        begun = {one.begun for one in told if one.begun and one.position[0] == committed}
        if len(begun) > 1:
            raise _not_in_step()
        if committed > self._committed:
            self._has_committed()  # as those did that came out of the meeting, among all who were in it
        result = given if calls > self._calls else None
        fails_here = fails and calling and calls == self._calls
        self._failing += 1 if fails and not fails_here else 0
        self._left = {rank: timings for rank, timings in told[0].timings.items() if rank not in members}
        self._void_passes, self._asked = voids, 0
        if voids:
            session.pass_state.want()
        self._void_in = next(iter(begun), None)
        self._calls = calls + 1 if fails else calls
        self.number, self.members = number, members
        group = session.group
        assert isinstance(group, MendedGroup)
        group.take(comm)
        regroup(session, bootstrap.environment, engines, told)
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
        gone = [rank for rank in before if rank not in self.members]
        new = [rank for rank in self.members if rank not in before]
        if self._session.rank == 0 and (gone or new):
            ms = 1e3 * (time.monotonic() - began)
            old = [rank for rank in self.members if rank in before]
            words = (
                f"{name(self.members)} on without {name(gone, '')}"
                if not new
                else f"{name(new, 'join')} {name(old, '')}"
            )
            words = f"generation {number}: {words} after {ms:.0f} ms"
            self._session.telemetry.event(_core.EVENT_GENERATION, self._session.step, number, words)


class Told(NamedTuple):
    """What a member of a new generation says of itself to the others."""

    members: list[int]
    position: tuple[int, int, int, bool, bool]
    begun: int  # the pass in which it has begun the next turn; 0: it has not
    result: bytes | str  # of its last call; words: why nobody can be given it
    speed: float | None
    device: str
    host: str
    pool: int  # of memory
    caps: list[int | None]  # of samples, as its script says, of each of evenstep.regrouping.shares_in
    buckets: list[int | None]  # the same
    workers: list[tuple[int, int] | None]  # of evenstep.regrouping.own_workers
    timings: dict[int, list[Any]]  # by ranks' numbers in the job: what was measured of each, of the same

    def of_members(self) -> list[list[Any] | None]:
        """The timings of each member; of one that took a lost rank's place, what was measured of the last one lost."""
        lost = [rank for rank in self.timings if rank not in self.members]
        return [self.timings.get(rank) or (self.timings[lost.pop()] if lost else None) for rank in self.members]


def name(ranks: Sequence[int], verb: str = "go") -> str:
    """ "rank 0 goes", "ranks 0, 2 and 3 go"."""
    if verb:
        verb = f" {verb}" + (("es" if verb.endswith("o") else "s") if len(ranks) == 1 else "")
    words = [str(rank) for rank in ranks]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{verb}"


def _ended() -> EvenstepError:
    return EvenstepError("the others do not go on, so nobody can join them (EVEN_ERR_REVOKED)")


def _made(comm: _core.Comm | None) -> _core.Comm:
    if comm is None:
        raise EvenstepError(f"those that are left cannot go on without the rank that was lost: {BETWEEN_HOSTS}")
    return comm


def _not_in_step() -> EvenstepError:
    return EvenstepError(
        "the ranks that are left are at different calls of the script, so they cannot go on without the one that was lost\n"
        "  fix: let all ranks make the same calls in the same order"
    )


def host_timeout() -> float:
    """Seconds after which the agents take a silent host for lost; they have checked the variable."""
    return float(os.environ.get("EVENSTEP_HOST_TIMEOUT") or 4)


def open_recovery(session: Session) -> Recovery | None:
    """None where the launcher did not ask for it."""
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
