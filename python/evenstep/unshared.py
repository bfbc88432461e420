"""Whether the script shares nothing out: its ranks train on the same batches, or on none of the prepared loader's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from evenstep import sites

if TYPE_CHECKING:
    from evenstep.data_course import DataCourse
    from evenstep.vote import Ballot

_ALIKE = 3  # so many votes in a row is no chance
_WITHOUT = 10  # and so many are no warm-up before the loop

SAME = (
    "all ranks train on the same batches (their losses were equal to the bit three times in a row), so each computes the "
    "whole of what one device would, and nothing is shared out\n  fix: give the DataLoader to es.prepare; where the script draws "
    "batches itself, let each rank draw others: torch.manual_seed(seed + es.rank())"
)
UNUSED = (
    "a DataLoader was prepared, but the script has trained on batches that are not its so far: each rank has batches of its own, counted "
    "alike\n  fix: iterate over the loader that es.prepare returns (loader = es.prepare(loader))"
)


class Unshared:
    """Looks at the first votes of a training, until one is over a batch of a prepared loader's."""

    def __init__(self) -> None:
        self._votes, self._alike, self._over = 0, True, False
        self._losses: set[float] = set()

    def heard(
        self, ballots: Sequence[Ballot], loaders: Iterable[DataCourse], rank: int, *, at_work: bool = False
    ) -> None:
        """loaders: those that are prepared. at_work: the pass is over a batch of one of them, which a closure's votes, in a step that
        counts already, do not tell."""
        if self._over:
            return
        if len(ballots) == 1 or at_work or any(one.drawn for one in ballots):
            self._over = True
            return
        self._votes += 1
        self._over = self._votes == _WITHOUT
        if self._votes <= _ALIKE:
            first = ballots[0]
            self._alike = self._alike and all(one.loss == first.loss and one.weight == first.weight for one in ballots)
            self._losses.add(first.loss)
        if rank != 0 or self._votes not in (_ALIKE, _WITHOUT):
            return
        has_loader = any(one.train for one in loaders)
        moves = len(self._losses) > 1 and all(map(math.isfinite, self._losses))
        if has_loader and self._over:
            sites.warn(UNUSED)
        elif not has_loader and not self._over and self._alike and moves:
            sites.warn(SAME)
