"""Sums over the ranks of a process group of torch's that go on while backward does: each is begun, looked at now and then, and
waited for at the end. Sums of one group are begun in the same order on all ranks.

In 16 bits they are formed in fp32 in the order of the ranks and rounded once, which torch's own sums are not: parts go to the
rank that adds them up, and sums to all.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from evenstep.accelerators import Accelerators
from evenstep.exchange import all_gather_single


class SumUnderWay(Protocol):
    """Errors of the group are raised by whichever finds them."""

    def go_on(self, wait: bool = False) -> bool:
        """Begins what follows on what is done, in the order in which sums were begun; whether nothing is left to begin.
        `wait`: until it can be."""

    @property
    def done(self) -> bool:
        """Whether `wait` would not wait; where nothing is left to begin."""

    def wait(self) -> None:
        """Until it is, on the host or on the device's current stream; then it is where the values were."""

    def give_up(self) -> None:
        """Begins what is left to begin, whatever comes of it: nobody waits for this sum, and no other rank shall for ever."""


class PlainSum:
    """In the values' own type, as torch forms it."""

    def __init__(self, values: torch.Tensor, process_group: Any) -> None:
        self._work: Any = dist.all_reduce(values, group=process_group, async_op=True)

    def go_on(self, wait: bool = False) -> bool:
        return True

    @property
    def done(self) -> bool:
        return _is_done(self._work)

    def wait(self) -> None:
        self._work.wait()

    def give_up(self) -> None: ...


def _is_done(work: Any) -> bool:
    if not work.is_completed():
        return False
    work.wait()  # raises what it failed with
    return True


class _Narrow:
    """Values in 16 bits, and what comes of the other ranks' for the part that this rank adds up."""

    def __init__(self, values: torch.Tensor, wire: torch.dtype, ranks: int) -> None:
        self.values, self.ranks = values, ranks
        self.mine = torch.zeros(-(-values.numel() // ranks) * ranks, dtype=wire, device=values.device)
        self.mine[: values.numel()] = values
        self.theirs = torch.empty_like(self.mine)

    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `add_up` takes. Who takes it first runs short of memory before other ranks are sent anything."""
        part = self.mine.new_empty(self.mine.numel() // self.ranks)
        return torch.empty_like(part, dtype=torch.float32), part

    def add_up(self, room: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        """In the order of the ranks."""
        total, part = room or self.room()
        rows = self.theirs.view(self.ranks, -1)
        total.copy_(rows[0])
        for row in rows[1:]:
            total += row
        return part.copy_(total)

    def put(self) -> None:
        """What all ranks have added up, where the values were."""
        self.values.copy_(self.mine[: self.values.numel()])


class NarrowSum:
    """Of fp32 values that travel in 16 bits. Its second half is begun when some rank finds the first done, sooner on one than
    on another: it has a process group of its own."""

    def __init__(self, values: torch.Tensor, wire: torch.dtype, first: Any, second: Any) -> None:
        self._narrow, self._second = _Narrow(values, wire, dist.get_world_size(first)), second
        mine, theirs = self._narrow.mine, self._narrow.theirs
        self._work: Any = dist.all_to_all_single(theirs, mine, group=first, async_op=True)
        self._added = False

    @torch.no_grad()
    def go_on(self, wait: bool = False) -> bool:
        if not self._added and (wait or _is_done(self._work)):
            self._work.wait()
            self._send(self._narrow.add_up())
        return self._added

    def _send(self, part: torch.Tensor) -> None:
        self._part = part  # is kept until it has been sent
        self._work = all_gather_single(self._narrow.mine, part, group=self._second, async_op=True)
        self._added = True

    @property
    def done(self) -> bool:
        return _is_done(self._work)

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        self._narrow.put()

    def give_up(self) -> None:
        if not self._added:
            self._narrow = _Narrow(
                self._narrow.values, self._narrow.mine.dtype, self._narrow.ranks
            )  # the other is in use
            self._send(self._narrow.add_up())


class SideStreams:
    """One beside the caller's on each device."""

    def __init__(self, accelerators: Accelerators | None = None) -> None:
        self.torch = accelerators or Accelerators()
        self._streams: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = self.torch.stream(device)
        return self._streams[device]


class NarrowSumBeside:
    """The same on an accelerator, whose collectives are put on streams without the host waiting: both halves at once, on a
    stream beside backward's."""

    @torch.no_grad()
    def __init__(self, values: torch.Tensor, wire: torch.dtype, process_group: Any, streams: SideStreams) -> None:
        self._torch, self._device = streams.torch, values.device
        side = streams.of(self._device)
        packed = self._torch.event(self._device)
        packed.record(self._torch.current(self._device))
        with self._torch.beside(side, self._device):
            side.wait_event(packed)
            narrow = _Narrow(values, wire, dist.get_world_size(process_group))
            room = narrow.room()
            dist.all_to_all_single(narrow.theirs, narrow.mine, group=process_group)
            all_gather_single(narrow.mine, narrow.add_up(room), group=process_group)
            narrow.put()
            self._there = self._torch.event(self._device)
            self._there.record(side)

    def go_on(self, wait: bool = False) -> bool:
        return True

    @property
    def done(self) -> bool:
        return bool(self._there.query())

    def wait(self) -> None:
        self._torch.current(self._device).wait_event(self._there)

    def give_up(self) -> None: ...
