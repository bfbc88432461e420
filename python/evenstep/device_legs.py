"""What connects a group's GPUs of several hosts where NCCL does not: communicators of each host's GPUs, one down and one up, and
legs, groups of ours of one rank a host, each of which carries a part of everything through the host's memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenstep import _core, sites
from evenstep.backend_device import limited, limited_by
from evenstep.crossing import Copies, Crossing, Trip
from evenstep.device_groups import DeviceGroups
from evenstep.device_places import HostParts
from evenstep.device_streams import CudaStreams, Watch
from evenstep.errors import error_of
from evenstep.group_end import ABORT_SECONDS, within
from evenstep.hosts import wanted_engine
from evenstep.leg_calls import check_calls, exchanged, record_of
from evenstep.rendezvous import open_group

TELLING_SECONDS = 1.0  # for a failure's cause; the store may be gone, too
_MEETING_LIMITS = 2  # of the legs': where a host does not come, they say it, and end the meeting


@dataclass(frozen=True)
class Passage:
    """A call, or a piece of one, whose first half is on the stream that goes down: sums of the host, and what of them this rank
    carries on its way to pinned memory."""

    carried: Sequence[tuple[int, Callable[[_core.Comm], None]]]  # lanes, and what is called in their legs
    up: Copies  # what has come, back to the GPU
    spread: Callable[[_core.DeviceComm, int], None]  # from those of the host who have it to the others, on a stream
    end: Callable[[int], None]  # what torch does with it, on that stream
    kept: Sequence[torch.Tensor]  # memory of the GPU that was made for it


@dataclass(frozen=True)
class Call:
    """What a passage is of."""

    words: str  # what the ranks compare
    place: sites.Place | None
    seconds: float  # its own limit, or 0
    of_inference: bool  # it writes tensors that torch lets be written in that mode alone


class _Stage:
    """Copies down are on their stream before a passage is handed on, which waits for them; those up are its own."""

    def enter(self) -> None: ...

    def land(self, copies: Copies, mark: Any, works: Sequence[Any]) -> None: ...

    def rise(self, copies: Copies) -> None: ...


class _Meeting:
    """Of a host's ranks, whose errors name these by the group's numbers."""

    def __init__(self, comm: _core.Comm, team: Sequence[int]) -> None:
        self.comm, self._team = comm, team
        self.record = b""
        """Of a call that begins, which is compared where the ranks meet next."""

    @property
    def closed(self) -> bool:
        return self.comm.closed

    def revoke(self) -> None:
        self.comm.revoke()

    def barrier(self) -> None:
        record, self.record = self.record, b""
        try:
            if not record:
                self.comm.barrier()
                return
            said = exchanged(self.comm, record)
        except _core.EvenstepError as error:
            place = error.rank
            if place is None or not 0 <= place < len(self._team) or self._team[place] == place:
                raise
            rank = self._team[place]
            words = f"rank {rank} was lost; where the ranks {list(self._team)} of its host meet it is number {place}: {error}"
            raise error_of(error.status, words, error.fix, rank) from error
        check_calls(said, self._team)


class HostLegs:
    """Those of one group. What fails in one call ends them all, on every rank."""

    def __init__(self, everyone: DeviceGroups, parts: HostParts, streams: CudaStreams) -> None:
        """Nothing is opened yet."""
        self._everyone, self._name, self.streams = everyone, everyone.name, streams
        self._timeout_seconds = everyone.timeout_seconds
        rank = everyone.rank
        self.hosts, self.lanes = parts.teams, parts.lanes
        self.host = next(host for host, team in enumerate(parts.teams) if rank in team)
        self.team = parts.teams[self.host]
        self.place = self.team.index(rank)
        self.carriers = [_core.lane_rank(lane, parts.lanes, len(self.team)) for lane in range(parts.lanes)]
        self.own_lanes = [lane for lane, place in enumerate(self.carriers) if place == self.place]
        self._ranks_of_legs = parts.legs
        self._down, self._up = (everyone.some(self.team, f"host {self.host}/{way}") for way in ("down", "up"))
        self._watch = Watch(lambda: [*self._down.opened(), *self._up.opened()])
        self._legs: dict[int, _core.Comm] = {}
        self._meeting: _Meeting | None = None
        self._crossing: Crossing | None = None
        self._met: set[int] = set()  # devices
        self._error: BaseException | None = None
        self._told = everyone.store_of("failure")

    # -- opening --

    def open(self, device: int) -> _core.DeviceComm | None:
        """The host's communicator for what goes down; None where this rank is alone on its host. The first time collective over
        the group."""
        self.check()
        if self._crossing is None:
            for lane, ranks in enumerate(self._ranks_of_legs):
                if lane in self.own_lanes:
                    self._legs[lane] = self._between(f"leg/{lane}", ranks, self.host)
            if len(self.team) > 1 and wanted_engine() != "hosts":  # which is none for one host
                self._meeting = _Meeting(self._between(f"meeting/{self.host}", self.team, self.place), self.team)
                self._meeting.comm.set_timeout(_MEETING_LIMITS * self._timeout_seconds)
            self._crossing = Crossing(_Stage(), self._meeting, "evenstep-legs")
        self.up_stream(device)  # made in no other thread
        if len(self.team) == 1:
            return None
        down, up = self._down.open(device), self._up.open(device)
        if device not in self._met:
            self._met.add(device)
            up.barrier(self.streams.current(device).cuda_stream)  # connects them, in no other thread
        return down

    def _between(self, words: str, ranks: Sequence[int], place: int) -> _core.Comm:
        comm = open_group(
            self._everyone.store_of(words),
            place,
            len(ranks),
            name=f"{self._name}/{words}",
            timeout_seconds=self._timeout_seconds,
            members=[self._everyone.members[rank] for rank in ranks],
            messages=False,
            number=ranks[place],
        )
        if comm is None:  # all ranks of the job have an engine of ours, or none
            raise _core.EvenstepError(
                f"{self._name}: no engine of ours connects the ranks {list(ranks)} of {words}\n"
                "  fix: unset EVENSTEP_DEVICE_HOSTS, and NCCL connects the hosts"
            )
        return comm

    def up_stream(self, device: int) -> Any:
        return self.streams.side(device, "legs up")

    # -- a call --

    def carry(
        self,
        device: int,
        passage: Passage,
        mark: Any,
        call: Call,
        first: bool,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """`mark`: behind what goes down; `first`: of the call; `ended` is told when all is on the stream that goes up, or the error.
        Passages come in one order on all ranks."""
        landed = threading.Event()
        record = record_of(call.words, sites.words_of(call.place)) if first else b""
        failed: list[BaseException] = []

        def land() -> None:
            sites.make_for(call.place)
            try:
                mark.synchronize()
                self._watch.check()
                for lane, carry in passage.carried:
                    leg = self._legs[lane]
                    with limited_by(leg, call.seconds, self._timeout_seconds):
                        carry(leg)  # whose words tell who is late, or makes a call that differs in this piece, too
                        if record and lane == 0:  # the ranks of a host meet, whatever they carry
                            check_calls(exchanged(leg, record), self._ranks_of_legs[lane])
            except BaseException as error:
                failed.append(error)
            landed.set()

        def arrive() -> None:
            sites.make_for(call.place)
            landed.wait()
            if failed:
                raise failed[0]
            meeting = self._meeting
            if meeting is not None:
                meeting.record = record
                meeting.comm.set_timeout(_MEETING_LIMITS * max(self._timeout_seconds, call.seconds))

        def spread() -> None:
            try:
                with torch.inference_mode(call.of_inference), torch.no_grad():
                    self._go_up(device, passage, call)
            except BaseException as error:
                give_up(error)
                raise
            ended(None)

        def give_up(error: BaseException | None) -> None:
            self.fail(error)
            ended(self._error)

        assert self._crossing is not None
        self._crossing.carry(Trip([], [], land, arrive), mark, [], spread, give_up)

    def _go_up(self, device: int, passage: Passage, call: Call) -> None:
        stream = self.up_stream(device)
        with self.streams.use(stream):
            for target, source in passage.up:
                self.streams.copy(target, source)
            if len(self.team) > 1:
                comm = self._up.open(device)
                comm.set_site(sites.words_of(call.place))
                with limited(comm, call.seconds):
                    passage.spread(comm, stream.cuda_stream)
            passage.end(stream.cuda_stream)
            for tensor in passage.kept:
                self.streams.keep(tensor, stream)

    # -- ends --

    @property
    def error(self) -> BaseException | None:
        return self._error or self._watch.error

    def check(self) -> None:
        error = self.error
        if error is not None:
            raise error

    def fail(self, error: BaseException | None) -> None:
        """No call comes through any more: the other hosts hear it from the legs, this one's ranks at their meeting, and nothing on a
        GPU waits. Any thread."""
        if self._error is None:
            self._error = found = (
                error or self._watch.error or _core.EvenstepError(f"{self._name}: the legs have ended")
            )
            self._revoke_comms()
            cause = self._cause_of(found)
            if isinstance(found, _core.EvenstepError) and cause is not None:
                self._error = cause
            within(ABORT_SECONDS, self._abort_gpus)

    def _cause_of(self, error: BaseException) -> BaseException | None:
        """What was told first; None where that is not known in time."""
        told = getattr(error, "status", "") == "EVEN_ERR_REVOKED"
        return within(TELLING_SECONDS, self._hear if told else lambda: self._tell(error))

    def _tell(self, error: BaseException) -> BaseException | None:
        """Those who hear only that the legs were revoked; what was told first is the cause."""
        said = {name: getattr(error, name, None) for name in ("status", "fix", "rank")}
        own = json.dumps({"words": str(error), **said})
        first = self._told.compare_set("why", "", own).decode()
        return error if first == own else self._hear()

    def _hear(self) -> BaseException | None:
        until = time.monotonic() + TELLING_SECONDS
        while not self._told.check(["why"]):
            if time.monotonic() > until:
                return None
            time.sleep(0.01)
        said = json.loads(self._told.get("why"))
        error = _core.EvenstepError(said["words"])
        error.status, error.fix, error.rank, error.device = said["status"] or "", said["fix"], said["rank"], None
        return error

    def _revoke_comms(self) -> None:
        for comm in self._comms():
            if not comm.closed:
                comm.revoke()

    def _abort_gpus(self) -> None:
        for groups in (self._down, self._up):
            groups.abort()

    def _comms(self) -> list[_core.Comm]:
        return [*self._legs.values(), *([] if self._meeting is None else [self._meeting.comm])]

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        for comm in self._legs.values():
            comm.set_timeout(seconds)
        if self._meeting is not None:
            self._meeting.comm.set_timeout(_MEETING_LIMITS * seconds)
        for groups in (self._down, self._up):
            groups.set_timeout(seconds)

    def abort(self) -> None:
        words = f"{self._name} was aborted on rank {self._everyone.rank}"
        own = None if self._error is not None else error_of("EVEN_ERR_REVOKED", words)
        self._error = self._error or own
        self._revoke_comms()
        if own is not None and self._crossing is not None:  # others hear of the legs that they were revoked
            within(TELLING_SECONDS, lambda: self._tell(own))
        self._abort_gpus()

    def close(self) -> None:
        """What is under way ends with it."""
        self._error = self._error or error_of("EVEN_ERR_STATE", f"{self._name} is closed")
        for comm in self._comms():
            comm.close()
        if self._crossing is not None:
            self._crossing.stop()
        self._legs, self._meeting, self._crossing = {}, None, None
        errors = []
        for groups in (self._down, self._up):
            try:
                groups.close()
            except _core.EvenstepError as error:
                errors.append(error)
        if errors:
            raise errors[0]
