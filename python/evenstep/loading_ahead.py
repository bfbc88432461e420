"""Which batches of an iteration are drawn, given to the loader that fetches them, and shared out among the ranks. Sharing out comes
last: workers are given batches as far ahead as torch wants, and hear of a batch's shares when its loading has to start."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from evenstep._core import EvenstepError
from evenstep.share_table import ShareTable, ends_with_script

if TYPE_CHECKING:
    from evenstep.loader import EvenLoader
    from evenstep.vote import Ballot

LEAST_LEAD = 2  # steps
MOST_LEAD = 255  # a byte of the vote
_MOST_BATCHES = 128  # shared out and not fetched: fewer than a table has places
_WINDOW = 32  # batches
_EVERY = 8


class Lead:
    """How many steps ahead shares are decided, on all ranks alike: two, or as many as the slowest loading needs."""

    def __init__(self, most_batches: int) -> None:
        self._most = most_batches  # that the loader is given ahead
        self.steps = self.needed = LEAST_LEAD
        self._loading: deque[float] = deque(maxlen=_WINDOW)
        self._work: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0

    def measured(self, loading: float, work: float, batches_per_step: int) -> None:
        """Of one batch: seconds in its worker, and until the next was asked for."""
        self._loading.append(loading)
        self._work.append(work)
        self._seen += 1
        if self._seen % _EVERY == 0:
            late = sorted(self._loading)[len(self._loading) * 9 // 10]
            batches = late / max(1e-9, statistics.median(self._work))
            batches = min(self._most, math.ceil(min(batches, MOST_LEAD)) + 1)
            self.needed = max(LEAST_LEAD, min(MOST_LEAD, math.ceil(batches / max(1, batches_per_step))))

    def heard(self, ballots: Sequence[Ballot]) -> None:
        """What all ranks have said in a vote."""
        self.steps = max(LEAST_LEAD, *(ballot.lead for ballot in ballots))

    def begin_anew(self) -> None:
        """Among other ranks, some of which have heard nothing."""
        self.steps = LEAST_LEAD


@dataclass(eq=False)
class Drawn:
    """A global batch that was drawn."""

    total: int  # samples of all ranks; 0: there is nothing to share out
    content: Any  # the feed's
    number: int = -1  # in the table
    shares: list[int] = field(default_factory=list)
    predicted: float = math.nan  # seconds of its step


class Ahead:
    """The batches of one iteration that are drawn and have not come to the script, in order."""

    def __init__(self, owner: EvenLoader, source: Iterator[Drawn], table: ShareTable | None, lead: Lead) -> None:
        """table: of the workers, where shares are said after a batch was given; None: when it is."""
        self._owner, self._source, self._table, self._lead = owner, source, table, lead
        self._ranks = owner.prepared_in.world_size
        self._drawn: deque[Drawn] = deque()
        self._given = self._decided = 0  # of these
        self._closed = False
        if table is not None:
            table.hold()
            self.decide()

    @property
    def waits(self) -> bool:
        """Whether workers are given batches before these are shared out."""
        return self._table is not None

    def give(self) -> Drawn | None:
        """The next batch for the loader that fetches; None: there is no more."""
        if self._given == len(self._drawn) and not self._draw():
            return None
        if self._table is None:
            self._share_out()
        self._given += 1
        return self._drawn[self._given - 1]

    def decide(self) -> None:
        """Before a batch is asked for: the shares of those that are due."""
        if self._table is None:
            return
        due = self._lead.steps
        while self._decided < _MOST_BATCHES and self._owner.steps_until(self._decided) <= due:
            if self._decided == len(self._drawn) and not self._draw():
                return
            one = self._share_out()
            if one.shares:
                self._table.say(one.number, one.shares)
            else:
                self._table.leave(one.number)

    def come(self) -> Drawn:
        """The next of those given has been fetched."""
        self._given -= 1
        self._decided -= 1
        return self._drawn.popleft()

    def close(self) -> None:
        """Nothing more is asked for: no worker is to wait. Once."""
        self._source = iter(())
        if self._table is not None and not self._closed:
            self._closed = True
            for one in islice(self._drawn, self._decided, self._given):
                self._table.leave(one.number)

    def _draw(self) -> bool:
        one = next(self._source, None)
        if one is None:
            return False
        if self._table is not None:
            one.number = self._table.number()
        self._drawn.append(one)
        return True

    def _share_out(self) -> Drawn:
        if self._owner.prepared_in.world_size != self._ranks:
            raise _share_lost()
        one = self._drawn[self._decided]
        if one.total:
            one.shares, one.predicted = self._owner.share_out(one.total, self._decided)
        self._decided += 1
        return one


class Loading:
    """The batches that the inner loader has fetched, each with what was drawn; no worker waits once it is gone."""

    def __init__(self, owner: EvenLoader, ahead: Ahead, fetched: Iterator[Any], lead: Lead) -> None:
        self._owner, self._ahead, self._fetched, self._lead = owner, ahead, fetched, lead
        self._came = 0.0  # when the last one did; 0: none
        self._seconds = 0.0  # in which it was loaded
        if ahead.waits:
            ends_with_script(self)

    def __iter__(self) -> Loading:
        return self

    def __next__(self) -> tuple[Drawn, Any]:
        if self._ahead.waits and self._came:
            self._lead.measured(self._seconds, time.perf_counter() - self._came, self._owner.batches_per_step)
        self._ahead.decide()
        reply = next(self._fetched)
        self._came, self._seconds = time.perf_counter(), reply.seconds
        self._owner.fetching_seconds += reply.seconds
        return self._ahead.come(), reply

    def close(self) -> None:
        self._ahead.close()

    def __del__(self) -> None:
        self._ahead.close()  # before the iterator ends its workers


def _share_lost() -> EvenstepError:
    from evenstep.mended_group import rank_lost

    return rank_lost(
        "a rank was lost while the others went through an evaluation, and its share of the samples with it",
        "catch es.RankLost, and begin the evaluation again; es.evaluate does so by itself",
    )
