"""Sums over the ranks of a process group of torch's that go on while backward does: each is begun, looked at now and then, and
waited for at the end. Sums of one group are begun in the same order on all ranks.

In 16 bits they are formed in fp32 in the order of the ranks and rounded once, which torch's own sums are not: parts go to the
rank that adds them up, and sums to all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep.accelerators import Accelerators
from evenstep.exchange import all_gather_single
from evenstep.group_end import wait_for
from evenstep.mended_group import Heed


class SumUnderWay(Protocol):
    """Errors of the group are raised by whichever finds them."""

    def go_on(self, wait: bool = False) -> bool:
        """Begins what follows on what is done, in the order in which sums were begun; whether nothing is left to begin.
        `wait`: until it can be."""

    @property
    def done(self) -> bool:
        """Whether `wait` would not wait; where nothing is left to begin."""

    @property
    def over(self) -> bool:
        """Whether none of its calls is under way: all are done, or have failed."""

    def wait(self) -> None:
        """Until it is, on the host or on the device's current stream; then it is where the values were."""

    def give_up(self) -> None:
        """Begins what is left to begin, whatever comes of it: nobody waits for this sum, and no other rank shall for ever."""


class PlainSum:
    """In the values' own type, as torch forms it."""

    def __init__(self, values: torch.Tensor, process_group: Any, heed: Heed = None) -> None:
        self._group, self._heed = process_group, heed
        self._work: Any = dist.all_reduce(values, group=process_group, async_op=True)

    def go_on(self, wait: bool = False) -> bool:
        return True

    @property
    def done(self) -> bool:
        return _is_done(self._work)

    @property
    def over(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        wait_for(self._work, self._group, heed=self._heed)

    def give_up(self) -> None: ...


def _is_done(work: Any) -> bool:
    if not work.is_completed():
        return False
    work.wait()  # raises what it failed with
    return True


class Room:
    """What a sum in 16 bits takes beside its values: these in 16 bits, and what comes of the other ranks' for the part that this rank
    adds up. Who has it runs short of memory in nothing that follows. `total`: where parts are added up in fp32, one after the other."""

    def __init__(
        self, count: int, wire: torch.dtype, device: torch.device, ranks: int, total: torch.Tensor | None = None
    ) -> None:
        self.ranks = ranks
        self.mine = torch.zeros(-(-count // ranks) * ranks, dtype=wire, device=device)
        self.theirs = torch.empty_like(self.mine)
        self._part = self.mine.new_empty(self.mine.numel() // ranks)
        self._total = self._part.float() if total is None else total[: self._part.numel()]

    def put(self, values: torch.Tensor) -> Room:
        self.mine[: values.numel()] = values
        return self

    def add_up(self) -> torch.Tensor:
        """In the order of the ranks."""
        rows = self.theirs.view(self.ranks, -1)
        self._total.copy_(rows[0])
        for row in rows[1:]:
            self._total += row
        return self._part.copy_(self._total)

    def take(self, values: torch.Tensor) -> None:
        """What all ranks have added up."""
        values.copy_(self.mine[: values.numel()])


class NarrowSum:
    """Of fp32 values that travel in 16 bits. Its second half is begun when some rank finds the first done, sooner on one than
    on another: it has a process group of its own. `room`: that was made for it before."""

    @torch.no_grad()
    def __init__(
        self,
        values: torch.Tensor,
        wire: torch.dtype,
        first: Any,
        second: Any,
        room: Room | None = None,
        heed: Heed = None,
    ) -> None:
        self._values, self._first, self._second, self._heed = values, first, second, heed
        room = room or Room(values.numel(), wire, values.device, dist.get_world_size(first))
        self._room = room.put(values)
        self._work: Any = dist.all_to_all_single(self._room.theirs, self._room.mine, group=first, async_op=True)
        self._added = False
        self._given_up: Any = None  # the first half, where it was

    @torch.no_grad()
    def go_on(self, wait: bool = False) -> bool:
        if not self._added and (wait or _is_done(self._work)):
            wait_for(self._work, self._first, heed=self._heed)
            self._send(self._room.add_up())
        return self._added

    def _send(self, part: torch.Tensor) -> None:
        self._part = part  # is kept until it has been sent
        self._work = all_gather_single(self._room.mine, part, group=self._second, async_op=True)
        self._added = True

    @property
    def done(self) -> bool:
        return _is_done(self._work)

    @property
    def over(self) -> bool:
        return bool(self._work.is_completed()) and (self._given_up is None or bool(self._given_up.is_completed()))

    @torch.no_grad()
    def wait(self) -> None:
        wait_for(self._work, self._second, heed=self._heed)
        self._room.take(self._values)

    def give_up(self) -> None:
        if not self._added:
            self._given_up, in_use = self._work, self._room.mine
            self._room = Room(self._values.numel(), in_use.dtype, in_use.device, self._room.ranks)
            self._send(self._room.add_up())


class SideStreams:
    """One beside the caller's on each device."""

    def __init__(self, accelerators: Accelerators | None = None) -> None:
        self.torch = accelerators or Accelerators()
        self._streams: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self.torch.stream(device)
        return self._streams[device]

    def beside(self, device: torch.device) -> AbstractContextManager[None]:
        """What is put on this thread's stream goes there."""
        return self.torch.beside(self.of(device), device)


class NarrowSumBeside:
    """The same on an accelerator, whose collectives are put on streams without the host waiting: both halves at once, on a
    stream beside backward's."""

    @torch.no_grad()
    def __init__(
        self,
        values: torch.Tensor,
        wire: torch.dtype,
        process_group: Any,
        streams: SideStreams,
        room: Room | None = None,
    ) -> None:
        self._torch, self._device = streams.torch, values.device
        side = streams.of(self._device)
        packed = self._torch.event(self._device)
        packed.record(self._torch.current(self._device))
        with streams.beside(self._device):
            side.wait_event(packed)
            room = (room or Room(values.numel(), wire, values.device, dist.get_world_size(process_group))).put(values)
            dist.all_to_all_single(room.theirs, room.mine, group=process_group)
            all_gather_single(room.mine, room.add_up(), group=process_group)
            room.take(values)
            self._there = self._torch.event(self._device)
            self._there.record(side)

    def go_on(self, wait: bool = False) -> bool:
        return True

    @property
    def done(self) -> bool:
        return bool(self._there.query())

    @property
    def over(self) -> bool:
        return self.done

    def wait(self) -> None:
        self._torch.current(self._device).wait_event(self._there)

    def give_up(self) -> None: ...
