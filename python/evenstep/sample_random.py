"""The random numbers of samples: each is fetched with generators seeded by where it is in the epoch, so that they are the same
whatever rank, worker or process fetches it, and whatever else that fetches.

Most data sets draw nothing, and seeding costs some 10 µs a sample. So what draws is found out: the first batch of a process is
fetched sample by sample, all generators seeded; from then on those alone that were drawn from are. The others are looked at
beside each batch: where one was drawn from after all, the batch is fetched again, with that one seeded, too, for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import default_collate, default_convert, get_worker_info

from evenstep.order import epoch_seed
from evenstep.random_generators import watched

_SAMPLE, _COLLATE = range(2)  # what a seed is for
_DRAW_NOTHING = (default_collate, default_convert)


class Where(NamedTuple):
    """Of samples that follow one another in an epoch's order."""

    seed: int  # of the loader
    epoch: int
    first: int  # samples of the epoch before them


@dataclass
class _Habit:
    """From which generators something draws, as far as was seen."""

    known: bool = False
    drawn: set[int] = field(default_factory=set)
    in_one: bool = False  # items cannot be had one by one

    def follow(
        self,
        start: int,
        first: int,
        items: Sequence[Any],
        one: Callable[[Any], Any],
        together: Callable[[], Any],
        looks: Sequence[Any],
    ) -> Any:
        """What one() gives for each item, generators seeded by its number; or together(), where nothing needs that. None: it was
        drawn from one that was not seeded, and is from now on. looks: at the generators as they stand."""
        generators = watched()
        if not self.known:
            results = []
            for number, item in enumerate(items, first):
                for generator in generators:
                    generator.seed(epoch_seed(start, number))
                seeded = [generator.look() for generator in generators]
                results.append(one(item))
                self.drawn |= {n for n, generator in enumerate(generators) if generator.drawn_since(seeded[n])}
            self.known = True
            return results
        if self.drawn and self.in_one:
            for n in self.drawn:
                generators[n].seed(epoch_seed(start, first))
            results = together()
        elif self.drawn:
            results = []
            for number, item in enumerate(items, first):
                for n in self.drawn:
                    generators[n].seed(epoch_seed(start, number))
                results.append(one(item))
        else:
            results = together()
        surprises = {n for n in range(len(generators)) if n not in self.drawn and generators[n].drawn_since(looks[n])}
        if surprises:
            self.drawn |= surprises
            self.in_one = not isinstance(results, list)
            return None
        return results


class SampleRandoms:
    """Of one copy of a data set and its collate function: in the rank's process, or in a worker."""

    def __init__(self, loader: int, together: bool, collate: Callable[[Any], Any]) -> None:
        """loader: its number. Those of one job have one seed as a rule, and their samples other random numbers all the same.
        together: whether the data set gives several samples in one call, which is not cut up for nothing."""
        self._loader = loader
        self._fetching = _Habit(known=together)
        self._collating = _Habit(known=collate in _DRAW_NOTHING)
        self._never_collating = self._collating.known

    def load(
        self,
        indices: Sequence[Any],
        where: Where,
        one: Callable[[Any], Any],
        together: Callable[[], Any],
        collate: Callable[[Any], Any],
    ) -> Any:
        """The collated samples. one: fetches one; together: all of them in one call. In the rank's own process the generators
        are then as they were, whatever was drawn: they are the script's."""
        before = looks = [generator.look() for generator in watched()]
        untouched = False
        try:
            while True:
                trusted = self._draws_nothing
                samples = self._fetching.follow(self._start(where, _SAMPLE), where.first, indices, one, together, looks)
                if samples is not None:
                    found = self._collate(samples, where, collate)
                    if found is not None:
                        untouched = trusted
                        return found[0]
                looks = [generator.look() for generator in watched()]
        finally:
            if not untouched and get_worker_info() is None:
                for generator, look in zip(watched(), before):
                    if generator.drawn_since(look):
                        generator.put_back(look)

    @property
    def collating_draws(self) -> bool:
        """As far as was seen."""
        return bool(self._collating.drawn)

    @property
    def _draws_nothing(self) -> bool:
        """As far as was seen."""
        return all(habit.known and not habit.drawn for habit in (self._fetching, self._collating))

    def _collate(self, samples: Any, where: Where, collate: Callable[[Any], Any]) -> list[Any] | None:
        if self._never_collating:
            return [collate(samples)]
        looks = [generator.look() for generator in watched()]
        start = self._start(where, _COLLATE)
        found: list[Any] | None = self._collating.follow(
            start, where.first, [samples], collate, lambda: [collate(samples)], looks
        )
        return found

    def _start(self, where: Where, purpose: int) -> int:
        """What the seeds of an epoch derive from."""
        return epoch_seed(epoch_seed(where.seed, where.epoch), 2 * self._loader + purpose)
