"""A split of the batches that the script gives (es.prepare(shares=…)), also among ranks that are left, or that have joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenstep._core import EvenstepError
from evenstep.policies import named, shown, whole_numbers

# (number of the batch in the training, its samples) -> shares of the ranks
ShareSchedule = Callable[[int, int], Sequence[int]]


class Schedule:
    """The function says what each of the ranks gets that the job began with, or each of those that there are now (it may ask
    es.world_size()). places: which of the former each rank has, None for one that is beyond them."""

    def __init__(self, function: ShareSchedule, ranks: int, places: Sequence[int | None] | None = None) -> None:
        self._function, self._ranks = function, ranks
        self._places: list[int | None] = list(range(ranks)) if places is None else list(places)
        self._news = ""  # what became of a rank's samples, until it is told
        self._noted = False

    def among(self, places: Sequence[int | None]) -> Schedule:
        """The same for other ranks."""
        return Schedule(self._function, self._ranks, places)

    def shares(self, number: int, batch: int, block: int = 1) -> list[int]:
        """block: of so many samples where they are shared out anew; only the batch's last one is smaller."""
        now = len(self._places)
        most = max(self._ranks, now)
        where = f"for batch {number} of {batch} samples on {now} ranks"
        fix = f"\n  fix: return {self._ranks} whole numbers >= 0 that add up to {batch}"
        try:
            given = whole_numbers(self._function(number, batch), most)
        except Exception as error:
            name, what = named(self._function), f"{type(error).__name__}: {error}"
            raise EvenstepError(f"the share schedule {name} failed {where}: {what}{fix}") from error
        if len(given) not in (self._ranks, now) or min(given, default=0) < 0 or sum(given) != batch:
            raise EvenstepError(f"the share schedule {named(self._function)} gave {shown(given, most)} {where}{fix}")
        if len(given) != self._ranks:
            return given
        there = [place for place in self._places if place is not None]
        if len(there) == now and sum(given[place] for place in there) == batch:
            return [given[place] for place in there]
        self._note()
        known = [given[place] for place in there]
        weights = [sum(known) if place is None else given[place] * len(known) for place in self._places]
        blocks, left, shares = in_proportion(-(-batch // block), weights), batch, []
        for count in blocks:
            shares.append(min(left, count * block))
            left -= shares[-1]
        return shares

    def _note(self) -> None:
        if self._noted:
            return
        self._noted = True
        lost = [str(place) for place in range(self._ranks) if place not in self._places]
        words = f"es.prepare(shares=…) is of {self._ranks} ranks"
        if lost:
            words += f": the share of rank {', '.join(lost)} goes to the others, in the proportions of theirs"
        if None in self._places:
            words += "; who came beyond them gets the mean of the others' shares"
        self._news = words

    def take_news(self) -> str:
        """What is to be told, once."""
        news, self._news = self._news, ""
        return news


def in_proportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total`, as near to the weights' proportions as can be; alike where all are zero."""
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    counts = [total * weight // whole for weight in weights]
    rest = total - sum(counts)
    for rank in sorted(range(len(weights)), key=lambda r: (-(total * weights[r] % whole), r))[:rest]:
        counts[rank] += 1
    return counts


def places_among(told: Sequence[int | None], ranks: int) -> list[int | None]:
    """told: the places that ranks have already; the others take those that are free, in their order."""
    free = [place for place in range(ranks) if place not in told]
    return [place if place is not None else free.pop(0) if free else None for place in told]
