"""In which order gradients come, learned in the first pass that the ranks exchange: a bucket is reduced once it is full, so
what comes together belongs together. Rank 0's order counts; what no rank had goes last, and holds nothing up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evenstep.group import broadcast_bytes

if TYPE_CHECKING:
    from evenstep.group import Group


class LearnedOrder:
    def __init__(self) -> None:
        self.learning = True
        self.seen: list[int] = []  # parameters, as their gradients came; some maybe more than once
        self.wanted: tuple[list[int], list[int]] | None = None  # the order, and what goes last, where it is another one

    def agree(self, group: Group, used: Sequence[int]) -> None:
        """Collective. used[i]: whether some rank had a gradient of parameter i."""
        mine = [index for index in dict.fromkeys(self.seen) if index < len(used)]
        first = array("q", broadcast_bytes(group, array("q", mine).tobytes()))
        self.seen.clear()
        as_it_is = range(len(used) - 1, -1, -1)
        order = [index for index in dict.fromkeys((*first, *as_it_is)) if used[index]]
        late = [index for index in as_it_is if not used[index]]
        if order != list(as_it_is):
            self.wanted = order, late
