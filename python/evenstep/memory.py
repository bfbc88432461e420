"""How much memory this rank's steps need, and how many samples fit: what it tells the others of it in every vote."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from evenstep._core import Memory, MemoryCurve
from evenstep.hosts import this_host
from evenstep.kept_memory import PeakGrowth, kept_memory

if TYPE_CHECKING:
    from evenstep.vote import Ballot

# What stays free of a limit: memory is not only taken by samples, and never without gaps.
_RESERVE = {"cpu": 0.05, "cuda": 0.08}
_TAKEN = 4  # steps of a split that are measured: the second one is the first with an optimizer's state
_LOOK_EVERY = 64  # steps between two looks at what other processes have left

UNKNOWN = (1 << 63) - 1

Report = tuple[int, int, int, "int | None"]  # a rank's: pool, samples, cap, room


@dataclass(frozen=True)
class Use:
    """What a memory says."""

    held: int  # by this process now, for good or until it is asked
    peak: int  # the most since the last reset
    available: int  # beside `held`, if nobody else takes it
    limit: int
    kept: int = 0  # of `held`: freed, and kept for the next step
    free: float = 1.0  # the least part that is free of the memory itself, and of what limits it


class Source(Protocol):
    """A memory that can be measured."""

    reserve: float

    def read(self) -> Use: ...
    def reset(self) -> bool: ...
    def give_back(self) -> None:
        """What was freed and is kept for later, where that is not what `held` is about; and nothing is kept from now on."""

    @property
    def pool(self) -> str:
        """The same for ranks that share it."""


class HostMemory:
    """That of the process's host, or of the control group that limits it."""

    reserve = _RESERVE["cpu"]

    def __init__(self, root: str = "") -> None:
        self._memory = Memory(root)

    def read(self) -> Use:
        held, peak, available, limit, _, free = self._memory.read()
        return Use(held, peak, available, limit, kept_memory.of(held), free)

    def reset(self) -> bool:
        return self._memory.reset_peak()

    def give_back(self) -> None:
        kept_memory.end()
        self._memory.give_back()

    @property
    def pool(self) -> str:
        folder = self._memory.read()[4]
        return f"{this_host()}{_namespace() if folder else ''}{folder}"


class DeviceMemory:
    """That of a GPU, as torch's allocator sees it: what it keeps for later counts as held."""

    reserve = _RESERVE["cuda"]

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Use:
        free, total = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device)
        return Use(held, torch.cuda.max_memory_allocated(self._device), free, total)

    def reset(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    def give_back(self) -> None:
        """Peaks are of what is allocated; torch's cache is emptied by torch before it runs out."""

    @property
    def pool(self) -> str:
        properties: Any = torch.cuda.get_device_properties(self._device)
        return f"gpu {getattr(properties, 'uuid', '') or (_namespace(), self._device.index)}"


def _namespace() -> str:
    """Of control groups: two containers may name different groups alike."""
    try:
        return os.readlink("/proc/self/ns/cgroup")
    except OSError:
        return ""


def memory_of(device: torch.device) -> Source:
    if device.type == "cuda":
        return DeviceMemory(device)
    return HostMemory()


class MemoryWatch:
    """Measures this rank's steps.

    `cap`: the most samples that a limit of its own holds, -1: none. `room`: so many more its pool's memory holds than it
    had; UNKNOWN. `growth`: bytes by which its peak is above what it holds between two steps: ranks that share a memory
    leave so much to one another.
    """

    def __init__(self, source: Source, limit: int | None = None) -> None:
        self._source = source
        self._limit = limit  # the user's, in bytes
        self._curve = MemoryCurve()
        self._floor = 0  # where no new peak can begin: what it was
        self._largest = 0
        self._largest_peak = self._sample_bytes = 0.0  # of it: the latter is freed when backward has ended
        self._shares: list[int] = []
        self._count = 0
        self._growth_of_others = 0.0
        self._shared = math.inf  # bytes of the pool that were this rank's when they were last looked at
        self._look_again = False
        self._peaks = PeakGrowth()
        self._short = False  # the last step's peak was above a limit: the allocator is to keep nothing between steps
        self.pool = zlib.crc32(source.pool.encode()) | 1 << 32
        self.cap, self.room, self.growth = -1, UNKNOWN, 0.0
        self._measures = True  # False: the step under way is none to learn from
        self._piece = 0  # the most samples at once of the step under way; 0: all that it has
        self._most = -1  # that fitted when the rank ran out of memory; -1: it never did
        self.begin()

    def begin(self) -> None:
        """What came until now was no training step (an evaluation, a checkpoint): it says nothing of one."""
        self._floor = 0 if self._source.reset() else self._source.read().peak

    def ran_out(self, most: int) -> None:
        """The rank ran out of memory: no more than so many samples at once. What was measured in this step says nothing."""
        self._most = most
        self.cap = most if self.cap < 0 else min(self.cap, most)
        self._measures = False
        self._source.give_back()

    def came_in_pieces(self, most: int) -> None:
        """The step under way had no more than so many samples at once."""
        self._piece = most

    def others(self, growth: float) -> None:
        """Of all other ranks of its pool together, in the last vote."""
        self._growth_of_others = growth

    def stepped(self, step: int, samples: int, shares: list[int]) -> None:
        """At the end of a backward: `samples` were this rank's in each batch of the step, `shares` those of all."""
        samples, self._piece = min(samples, self._piece or samples), 0
        if shares != self._shares:
            self._shares, self._count = shares, 0
        self._count += 1
        emptied = kept_memory.take_given_back()
        look = self._count <= _TAKEN or step % _LOOK_EVERY == 0 or self._look_again
        self._look_again = look and emptied
        if look and self._measures:
            use = self._source.read()
            self._learn(samples, use)
            self._judge(samples, use, emptied)
            self._keep(step, samples, use)
        if self._short:
            self._source.give_back()
        if look or not self._measures:
            self.begin()
        self._measures = True

    def _keep(self, step: int, samples: int, use: Use) -> None:
        """What is kept for the next step leaves others their room, and gaps between its blocks do not pile up."""
        if not kept_memory.on:
            return
        if kept_memory.half_stays_free and use.free < 0.5:
            kept_memory.end("less than half of the memory is free")
        elif self._peaks.seen(step, samples, use.peak):
            kept_memory.give_back()
            self._look_again = True

    def _learn(self, samples: int, use: Use) -> None:
        """Not of a smaller size after a larger one, unless the allocator had to give back what that left behind."""
        self.growth = float(max(0, use.peak - use.held))
        if samples < 1 or use.peak <= self._floor or not (samples >= self._largest or self._short):
            return
        self._curve.take(samples, float(use.peak))
        if samples < self._largest:
            return
        if samples > self._largest:
            self._largest, self._largest_peak, self._sample_bytes = samples, 0.0, 0.0
        self._largest_peak = max(self._largest_peak, float(use.peak))
        self._sample_bytes = max(self._sample_bytes, (self.growth + use.kept) / samples)

    def _holds(self, limit: float) -> int:
        """Samples; -1: unknown. A line through two peaks may be flatter than the truth, where the first steps held more
        than later ones need: each sample takes at least its part of what is freed after backward."""
        holds = self._curve.cap(limit)
        if holds >= 0 and self._sample_bytes > 0:
            more = math.floor((limit - self._largest_peak) / self._sample_bytes)
            holds = min(holds, max(0, self._largest + more))
        return holds

    def _judge(self, samples: int, use: Use, emptied: bool) -> None:
        """emptied: what ranks had kept went back before the step; others that have not taken theirs again leave no room by it."""
        shared = use.held + use.available - self._growth_of_others - self._source.reserve * use.limit
        self._shared = shared = min(shared, self._shared) if emptied else shared
        own = math.inf if self._limit is None else float(self._limit)
        holds = self._holds(shared)
        self.room = UNKNOWN if holds < 0 else holds - samples
        self.cap = -1 if self._limit is None else self._holds(own)
        if self._most >= 0:
            self.cap = self._most if self.cap < 0 else min(self.cap, self._most)
        self._short = use.peak > min(shared, own)


class RanksMemory:
    """What all ranks know of one another's."""

    def __init__(self, watch: MemoryWatch, pools: Sequence[int], rank: int) -> None:
        self.watch, self._pools = watch, list(pools)
        self._neighbours = [r for r, pool in enumerate(pools) if pool == watch.pool and r != rank]

    def heard(self, ballots: Sequence[Ballot]) -> None:
        """Those of a vote."""
        self.watch.others(math.fsum(ballots[rank].growth for rank in self._neighbours))

    def reports(self, ballots: Sequence[Ballot], timings: Sequence[tuple[int, float]]) -> list[Report]:
        """For even_memory_caps: `timings` have the samples that each rank had."""
        return [
            (pool, samples, one.cap, None if one.room == UNKNOWN else one.room)
            for pool, one, (samples, _) in zip(self._pools, ballots, timings)
        ]
