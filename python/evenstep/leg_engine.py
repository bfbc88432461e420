"""Gradients of ranks that all are on accelerators, on several hosts: the ranks of a host add up among themselves, on their
devices, and some of them carry a part each of every bucket to their likes on the other hosts, through the host's memory:
over UCX, or, where that is not on all hosts, over Gloo.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.bucket_engine import BUCKET_BYTES, Bucket
from evenstep.compression import WIRES
from evenstep.crossing import Trip, Waiter, cut
from evenstep.device_places import HostParts
from evenstep.engine import EngineOptions, Report
from evenstep.group import Bootstrap, Group
from evenstep.group_end import wait_for
from evenstep.hybrid_engine import HostEngine, StagedEngine, make_team, open_meeting
from evenstep.sums_under_way import NarrowSum

_SLOT_BYTES = 64  # slots begin at multiples of this


class Leg(Protocol):
    """Between the ranks that carry the same part of every bucket, one of each host. A round: begin, ready for each bucket in
    order, finish."""

    memory: torch.Tensor  # the host's, in which the slots lie

    def lay_out(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Between rounds: a slot for each bucket's part."""

    def begin(self, step: int) -> None: ...

    def ready(self, number: int) -> None: ...

    def await_sum(self, number: int) -> None:
        """Any thread."""

    def finish(self) -> Report: ...

    def close(self) -> None: ...


class EngineLeg:
    """Over an engine group of ours."""

    def __init__(self, comm: _core.Comm, telemetry: _core.Telemetry, options: EngineOptions) -> None:
        self._comm, self._telemetry = comm, telemetry
        self._options = replace(options, bucket_bytes=1, bucket_elements=0, static_graph=False)  # each part is a bucket
        self.memory = torch.frombuffer(comm.arena(), dtype=torch.uint8)
        self._engine: HostEngine | None = None
        self._last = -1

    def lay_out(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        self._end()
        like = [torch.empty(count, dtype=dtype) for count, dtype in reversed(parts)]  # it begins with the last
        self._engine, self._last = HostEngine(like, self._comm, self._telemetry, self._options), len(parts) - 1
        return list(reversed(self._engine.views))

    def begin(self, step: int) -> None:
        assert self._engine is not None
        self._engine.begin(1.0, step)  # the weights are in the buckets

    def ready(self, number: int) -> None:
        assert self._engine is not None
        self._engine.ready(self._last - number, self._engine.views[self._last - number])

    def await_sum(self, number: int) -> None:
        assert self._engine is not None
        self._engine.await_sum(self._last - number)

    def finish(self) -> Report:
        assert self._engine is not None
        return self._engine.finish()[1]

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        self._end()
        self._comm.close()


class GlooLeg:
    """Over torch's Gloo, whose sums may differ from ours in their last bits. One thread makes the calls, in their order."""

    def __init__(self, process_group: Any, room_bytes: int, options: EngineOptions) -> None:
        self._process_group = process_group
        self._wire = WIRES.get(options.compression.name) if options.compression is not None else None
        self.memory = torch.empty(room_bytes, dtype=torch.uint8)
        self._calls = Waiter("evenstep-leg")
        weakref.finalize(self, self._calls.stop)
        self._took_ns = self._bytes = self._full_bytes = 0

    def lay_out(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        self._slots, at = [], 0
        for count, dtype in parts:
            size = count * dtype.itemsize
            self._slots.append(self.memory[at : at + size].view(dtype))
            at += -(-size // _SLOT_BYTES) * _SLOT_BYTES
        return self._slots

    def begin(self, step: int) -> None:
        del step
        self._summed = [threading.Event() for _ in self._slots]
        self._took_ns = self._bytes = self._full_bytes = 0

    def ready(self, number: int) -> None:
        self._calls.submit(lambda: self._sum(number))

    def _sum(self, number: int) -> None:
        start, slot = _core.clock_ns(), self._slots[number]
        try:
            short = self._wire is not None and slot.dtype is torch.float32
            if short:
                narrow = NarrowSum(slot, self._wire, self._process_group, self._process_group)
                narrow.go_on(wait=True)
                narrow.wait()
            elif slot.numel():
                wait_for(dist.all_reduce(slot, group=self._process_group, async_op=True), self._process_group)
        except BaseException:
            for one in self._summed:  # those that come after it will not
                one.set()
            raise
        self._took_ns += _core.clock_ns() - start
        self._bytes += slot.nbytes // 2 if short else slot.nbytes
        self._full_bytes += slot.nbytes
        self._summed[number].set()

    def await_sum(self, number: int) -> None:
        self._summed[number].wait()
        self._calls.check()

    def finish(self) -> Report:
        start = _core.clock_ns()
        self._calls.join()
        return Report(self._took_ns, 0, _core.clock_ns() - start, self._bytes, self._full_bytes)

    def close(self) -> None:
        self._calls.stop(1.0)
        dist.destroy_process_group(self._process_group)


class LegEngine(StagedEngine):
    """`legs`: those that this rank carries, by the number of their part."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        team: Any,
        lanes: int,
        legs: dict[int, Leg],
        group: Group,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, team, [leg.memory for leg in legs.values()], options)
        self._lanes, self._legs, self._group = lanes, legs, group
        self._lay_legs()

    def _lay_legs(self) -> None:
        self._slots = {}
        for lane, leg in self._legs.items():
            parts = [cut(bucket.flat, self._lanes)[lane] for bucket in self._buckets]
            self._slots[lane] = leg.lay_out([(part.numel(), part.dtype) for part in parts])

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        super().reorder(order, late)
        self._lay_legs()
        return True

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        for leg in self._legs.values():
            leg.begin(step)

    def _trip(self, number: int, bucket: Bucket) -> Trip | None:
        legs = self._legs
        if not legs:
            return None
        parts = cut(bucket.flat, self._lanes)
        pairs = [(self._slots[lane][number], parts[lane]) for lane in legs]

        def landed() -> None:
            for leg in legs.values():
                leg.ready(number)

        def summed() -> None:
            for leg in legs.values():
                leg.await_sum(number)

        return Trip(pairs, [(part, slot) for slot, part in pairs], landed, summed)

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        used = self.used_anywhere(self._group)
        start = _core.clock_ns()
        self._hand_on_complete(closing=True)
        self._down.join()
        reports = [leg.finish() for leg in self._legs.values()]
        self._all_up()
        exposed = _core.clock_ns() - start
        if not reports:
            return used, Report(0, 0, exposed, self._full_bytes)
        longest = max(reports, key=lambda one: one.communication_ns)
        moved, full = sum(one.bytes for one in reports), sum(one.full_bytes for one in reports)
        return used, Report(longest.communication_ns, longest.peer_wait_ns, exposed, moved, full)

    def close(self) -> None:
        """Between rounds: it is not used any more. Collective."""
        self._crossing.stop()
        for leg in self._legs.values():
            leg.close()
        if self._team is not None:
            for process_group in (self._team.down, self._team.up):
                dist.destroy_process_group(process_group)


def room_bytes(parameters: Sequence[torch.Tensor], lanes: int, options: EngineOptions) -> int:
    """What the slots of a part need at most, in whatever order gradients come."""
    sizes = [p.numel() * p.element_size() for p in parameters]
    limit = max((options.bucket_limit(p.element_size(), BUCKET_BYTES) for p in parameters), default=0)
    slack = 64 * 8 + _SLOT_BYTES  # of each bucket: parts begin at multiples of 64 elements, slots at those of bytes
    largest = max([limit, *sizes]) // lanes + slack
    return sum(sizes) // lanes + (len(sizes) + 2) * slack + largest  # in 16 bits it also goes through room of its own


def leg_engine(
    parameters: Sequence[torch.Tensor],
    bootstrap: Bootstrap,
    group: Group,
    parts: HostParts,
    options: EngineOptions,
    telemetry: _core.Telemetry,
) -> tuple[LegEngine, str]:
    """And what its legs go over. Collective over all ranks."""
    room = room_bytes(parameters, parts.lanes, options)
    legs: dict[int, Leg] = {}
    over = "Gloo"
    for lane, ranks in enumerate(parts.legs):
        comm = bootstrap.shared(room, "leg", ranks, measures=True)
        opened = group.exchange(bytes([group.rank not in ranks or comm is not None]))
        if comm is not None:
            legs[lane] = EngineLeg(comm, telemetry, options)
        if b"\0" not in opened:
            over = "our engines"
        elif group.rank in ranks:
            legs[lane] = GlooLeg(bootstrap.torch_group("gloo", ranks), room, options)
    meeting, team = open_meeting(bootstrap, parts.teams), None
    for members in parts.teams:
        if group.rank in members and len(members) > 1:
            team = make_team(bootstrap, parts.backend, members, parts.lanes, meeting, parameters[0].device)
    return LegEngine(parameters, team, parts.lanes, legs, group, options), over
