"""The memory of `Group.empty`: pieces of a rank's arena, given out and taken back."""

from __future__ import annotations

from collections import deque
from typing import Any

from evenstep import _core
from evenstep.comm_data import argument_error, data_of

_LINE = 64  # arrays begin on a cache line of their own


class Block:
    """A piece of the arena, seen by NumPy. The group's memory stays as long as any of them."""

    def __init__(self, arena: Arena, offset: int, size: int, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
        self._arena = arena
        self._place = (offset, size)

    def __del__(self) -> None:
        self._arena.returned.append(self._place)


class Arena:
    """This rank's part of the group's shared memory, given out in pieces; the first that fits."""

    def __init__(self, comm: _core.Comm, total: int) -> None:
        self._memory = comm.handle  # keeps it mapped
        self._address = data_of(comm.arena()).address if total else 0
        self._total = total
        self._free = [(0, total)]
        # Given back wherever an array happens to die, also in another thread: taken up by the next `take`.
        self.returned: deque[tuple[int, int]] = deque()

    def _merge(self) -> None:
        while self.returned:
            self._free.append(self.returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self._free):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged

    def take(self, size: int, interface: dict[str, Any]) -> Block:
        self._merge()
        padded = max(_LINE, (size + _LINE - 1) // _LINE * _LINE)
        for i, (offset, room) in enumerate(self._free):
            if room >= padded:
                self._free[i : i + 1] = [(offset + padded, room - padded)] if room > padded else []
                data = {"data": (self._address + offset, False), "version": 3}
                return Block(self, offset, padded, {**interface, **data})
        raise argument_error(
            f"{size} bytes do not fit into the group's arena of {self._total} bytes",
            "open the group with a larger arena_bytes=, or drop arrays that are not needed any more",
        )
