"""Gradients of ranks whose devices are of different makers (GPUs and CPUs, or GPUs of two makers), each bucket on its way
while backward goes on.

The ranks of one maker on one host that have collectives add up among themselves, on their devices; the first of them meets
the others in the host's memory, where each rank without collectives brings its own. One thread waits for what comes
down, the engine's adds it up, another waits for sums, in their order, and brings each up as soon as it is there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.accelerators import Accelerators
from evenstep.bucket_engine import Bucket, BucketEngine
from evenstep.crossing import Copies, Crossing, Trip, cut
from evenstep.device_places import Makers
from evenstep.engine import EngineOptions, Report, SharedEngine
from evenstep.group import Bootstrap, Group
from evenstep.hosts import wanted_engine


class HostStage:
    """Of a device whose memory is the host's, but not the group's."""

    def mark(self) -> Any:
        """After what this thread has put on its stream."""
        return None

    def follow(self, mark: Any) -> None:
        """What this thread puts on its stream from here on comes after the mark."""

    def enter(self) -> None:
        """The calling thread, none of the script's, has a stream of its own from here on."""

    def land(self, copies: Copies, mark: Any, works: Sequence[Any]) -> None:
        """Returns when what comes from the device, after the mark and the works, is on the host."""
        for work in works:
            work.wait()
        for target, source in copies:
            target.copy_(source)

    def rise(self, copies: Copies) -> None:
        """Begins the way back, on this thread's stream."""
        for target, source in copies:
            target.copy_(source)


class DeviceStage(HostStage):
    """Of an accelerator. Copies go straight between its memory and the group's, which is pinned where CUDA takes it."""

    def __init__(
        self, device: torch.device, memory: Sequence[torch.Tensor], accelerators: Accelerators | None = None
    ) -> None:
        self._device, self._torch = device, accelerators or Accelerators()
        self._entered = threading.local()
        for one in memory:
            unpin = self._torch.pin(device, one.data_ptr(), one.nbytes) if one.nbytes else None
            if unpin is not None:
                weakref.finalize(self, unpin)

    def mark(self) -> Any:
        event = self._torch.event(self._device)
        event.record(self._torch.current(self._device))
        return event

    def follow(self, mark: Any) -> None:
        self._torch.current(self._device).wait_event(mark)

    def enter(self) -> None:
        if not hasattr(self._entered, "stream"):
            self._entered.stream = self._torch.stream(self._device)
            self._torch.use(self._entered.stream)

    def land(self, copies: Copies, mark: Any, works: Sequence[Any]) -> None:
        self.follow(mark)
        for work in works:
            work.wait()
        for target, source in copies:
            self._torch.copy(target, source)
        self.mark().synchronize()

    def rise(self, copies: Copies) -> None:
        for target, source in copies:
            self._torch.copy(target, source)


def stage_of(device: torch.device, memory: Sequence[torch.Tensor]) -> HostStage:
    """memory: the host's, between which and the device's copies go."""
    return HostStage() if device.type == "cpu" else DeviceStage(device, memory)


@dataclass(frozen=True)
class Team:
    """Ranks that add up among themselves on their devices. What is summed leaves by its `carriers` (numbers in the job),
    of whom each has a part of every bucket, and comes back by them."""

    down: Any  # process groups, one for each direction: the calls of each have one order on all ranks
    up: Any
    carriers: tuple[int, ...]
    meeting: _core.Comm | None  # where they hear that sums are there, so that no device waits for these in a call

    def _parts(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        return [(part, rank) for part, rank in zip(cut(flat, len(self.carriers)), self.carriers) if part.numel()]

    def sum_up(self, flat: torch.Tensor) -> list[Any]:
        """Works by which each carrier has the sum of its part."""
        return [dist.reduce(part, rank, group=self.down, async_op=True) for part, rank in self._parts(flat)]

    def spread(self, flat: torch.Tensor) -> list[Any]:
        """Works by which all have the carriers' parts."""
        return [dist.broadcast(part, rank, group=self.up, async_op=True) for part, rank in self._parts(flat)]


def make_team(
    bootstrap: Bootstrap,
    backend: str,
    ranks: Sequence[int],
    lanes: int,
    meeting: _core.Comm | None,
    device: torch.device,
) -> Team:
    """Collective over its ranks."""
    down, up = bootstrap.torch_group(backend, ranks), bootstrap.torch_group(backend, ranks)
    for group in (down, up):  # connects them, one after the other: their later calls are of different threads
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    places = [_core.lane_rank(lane, lanes, len(ranks)) for lane in range(lanes)]
    return Team(down, up, tuple(dist.get_global_rank(down, place) for place in places), meeting)


def open_meeting(bootstrap: Bootstrap, teams: Sequence[Sequence[int]]) -> _core.Comm | None:
    """Of this rank's team; every rank of the job calls it. None where no engine of ours connects the team."""
    if wanted_engine() == "hosts":  # which is none for one host
        return None
    opened = [bootstrap.shared(0, "team", ranks) for ranks in teams if len(ranks) > 1]
    return next((comm for comm in opened if comm is not None), None)


class StagedEngine(BucketEngine):
    """Sums are formed on the host. A bucket goes down behind what the caller's stream has when it is complete, and comes up
    as soon as its sum is there, one after the other, each way on a thread of its own."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        team: Team | None,
        memory: Sequence[torch.Tensor],
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, options)
        self._team = team
        self.stage = stage_of(parameters[0].device if parameters else torch.device("cpu"), memory)
        self._crossing = Crossing(self.stage, None if team is None else team.meeting, "evenstep-hybrid")
        self._down, self._up = self._crossing.down, self._crossing.up
        self._told: list[Any] = []  # works by which this rank's team has sums
        self._risen: Any = None  # a mark behind what has come up

    def _trip(self, number: int, bucket: Bucket) -> Trip | None:
        """None where another rank of the team brings it."""
        raise NotImplementedError

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        works = [] if self._team is None else self._team.sum_up(bucket.flat)

        def spread() -> None:
            self._spread(bucket)
            self._risen = self.stage.mark()

        trip, mark = self._trip(number, bucket), self.stage.mark()
        self._crossing.carry(trip, mark, works, spread, lambda _: self._spread(bucket))

    def _spread(self, bucket: Bucket) -> None:
        """Also of what has failed: another rank of the team may have begun it, and cannot be told that it never ends."""
        if self._team is not None:
            self._told += self._team.spread(bucket.flat)

    @torch.no_grad()
    def give_up(self) -> None:
        """The round under way counts nothing, on no rank. What others wait for in calls that nobody can end comes, whatever it is:
        the buckets that this rank has not handed on. It waits for none of them."""
        self._hand_on_complete(closing=True)

    def _all_up(self) -> None:
        """What the caller's stream has from here on comes after the sums."""
        self._up.join()
        if self._risen is not None:
            self.stage.follow(self._risen)
        works, self._told, self._risen = self._told, [], None
        for work in works:
            work.wait()

    @property
    def _full_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.memory)


class HostEngine(SharedEngine):
    """The engine of the ranks that meet, as one of them on a device uses it."""

    def await_sum(self, index: int) -> None:
        self._sync.wait(self._place[index])

    def close(self) -> None:
        """Between rounds; another one may use the group's memory then."""
        self._sync.close()


class HybridEngine(StagedEngine):
    """Of a rank on an accelerator. `team`: the ranks whose devices add up among themselves, of which one meets the others;
    `comm`: the group in the host's memory, None where this rank is not in it."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        comm: _core.Comm | None,
        team: Team | None,
        flags: Group | None,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        memory = [] if comm is None else [torch.frombuffer(comm.arena(), dtype=torch.uint8)]
        super().__init__(parameters, team, memory, options)
        self._flags = flags
        self._gradients: dict[int, torch.Tensor] = {}  # of this round, where they go down as they are
        self._host: HostEngine | None = None
        if comm is not None:
            twins = [torch.empty_like(p, device="cpu") for p in parameters]
            self._host = HostEngine(twins, comm, telemetry, options)

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        if self._host is not None:
            self._host.reorder(order, late)
        return super().reorder(order, late)

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        if self._host is not None:  # of a team, the weights are in the buckets
            self._host.begin(weight if self._team is None else 1.0, step)

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        if self._team is None:
            self._gradients[index] = gradient
        else:
            super()._pack(index, gradient)

    def _leave_out(self, index: int) -> None:
        if self._team is not None:
            super()._leave_out(index)

    def _trip(self, number: int, bucket: Bucket) -> Trip | None:
        if self._host is None:
            return None
        host, slots = self._host, self._host.views
        if self._team is None:
            sources = {index: self._gradients[index] for index in bucket.indices if self._have[index]}
        else:  # another rank may have what this one lacks
            sources = {index: self.views[index] for index in bucket.indices}

        def landed() -> None:
            for index in sources:
                host.ready(index, slots[index])

        def summed() -> None:
            for index in sources:
                host.await_sum(index)

        down = [(slots[index], source) for index, source in sources.items()]
        return Trip(down, [(self.views[index], slots[index]) for index in sources], landed, summed)

    def settle(self) -> None:
        """Until what is complete is on the host. Not of a team, whose sums come from others."""
        if self._host is not None and self._team is None:
            self._down.join()

    def give_up(self) -> None:
        super().give_up()
        if self._host is not None:
            self._host.revoke()  # the host's own ranks hand no more on

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        used = self.used_anywhere(self._flags) if self._flags is not None else b""
        start = _core.clock_ns()
        self._hand_on_complete(closing=True)
        self._down.join()
        met = start
        report = Report(0, 0, 0, self._full_bytes)
        if self._host is not None:
            summed, report = self._host.finish()
            met = _core.clock_ns()
            used = used or bytes(summed)
        self._all_up()
        if self._host is not None and self._team is None:
            slots = self._host.views
            others = [index for index in range(len(self.views)) if used[index] and not self._have[index]]
            if others:
                self.stage.rise([(self.views[index], slots[index]) for index in others])
        self._gradients.clear()
        now = _core.clock_ns()
        if self._host is not None and self._team is None:  # a team meets once more
            report.own_ns = now - met
        report.exposed_ns = now - start
        return used, report


class BesideTeams(SharedEngine):
    """Of a rank on the host, beside teams: which parameters have a gradient all ranks tell one another, since a team's
    leader brings all."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        comm: _core.Comm,
        flags: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, comm, telemetry, options)
        self._flags = flags
        self._have = bytearray(len(parameters))

    def begin(self, weight: float, step: int) -> None:
        self._have = bytearray(len(self._parameters))
        super().begin(weight, step)

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        self._have[index] = 1
        super().ready(index, gradient)

    def finish(self) -> tuple[Sequence[int], Report]:
        used = bytes(map(max, zip(*self._flags.exchange(bytes(self._have))))) if self._have else b""
        return used, super().finish()[1]


def hybrid_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    makers: Makers,
    on_host: bool,
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> BucketEngine | SharedEngine | None:
    """Collective over all ranks; None where the ranks that are to meet in the host's memory cannot."""
    needed = SharedEngine.arena_bytes(parameters, options)
    comm = bootstrap.shared(needed, "gradients", makers.host, measures=True)
    opened = group.exchange(bytes([group.rank not in makers.host or comm is not None]))
    if b"\0" in opened:
        return None
    meeting, team = open_meeting(bootstrap, makers.teams), None
    for ranks, backend in zip(makers.teams, makers.backends):
        if group.rank in ranks:
            team = make_team(bootstrap, backend, ranks, 1, meeting, parameters[0].device)
    flags = group if makers.teams else None
    if not on_host:
        return HybridEngine(parameters, comm, team, flags, telemetry, options)
    assert comm is not None
    if flags is None:
        engine = SharedEngine(parameters, comm, telemetry, options)
    else:
        engine = BesideTeams(parameters, comm, flags, telemetry, options)
    engine.beside_others = True
    return engine
