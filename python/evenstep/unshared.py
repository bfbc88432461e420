"""Whether the script shares nothing out: its ranks train on the same batches, or on none of the prepared loader's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evenstep.vote import Ballot

_VOTES = 3  # alike in so many in a row is no chance

SAME = (
    "all ranks train on the same batches (their losses were equal to the bit three times in a row), so each computes the "
    "whole of what one device would, and nothing is shared out\n  fix: give the DataLoader to es.prepare; where the script draws "
    "batches itself, let each rank draw others: torch.manual_seed(seed + es.rank())"
)
UNUSED = (
    "a DataLoader was prepared, but the script trains on batches that are not its: each rank has batches of its own, counted "
    "alike\n  fix: iterate over the loader that es.prepare returns (loader = es.prepare(loader))"
)


class Unshared:
    """Looks at the first votes of a training."""

    def __init__(self) -> None:
        self._votes, self._alike = 0, True
        self._losses: set[float] = set()

    def heard(self, ballots: Sequence[Ballot], has_loader: bool, rank: int) -> None:
        """has_loader: one was prepared for training."""
        if self._votes == _VOTES or len(ballots) == 1:
            return
        if any(one.drawn for one in ballots):
            self._votes = _VOTES
            return
        self._votes += 1
        first = ballots[0]
        self._alike = self._alike and all(one.loss == first.loss and one.weight == first.weight for one in ballots)
        self._losses.add(first.loss)
        if self._votes < _VOTES or rank != 0:
            return
        moves = len(self._losses) > 1 and all(map(math.isfinite, self._losses))
        if has_loader:
            warnings.warn(UNUSED, stacklevel=2)
        elif self._alike and moves:
            warnings.warn(SAME, stacklevel=2)
