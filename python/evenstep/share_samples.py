"""What the inner loader fetches from: the data set of which each task takes this rank's share of a global batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from evenstep.sample_random import SampleRandoms, Where
from evenstep.share_table import ShareTable
from evenstep.unreadable import CollateReadable, ReadableSamples


class Place(NamedTuple):
    """Of a global batch."""

    seed: int  # of the loader
    epoch: int
    batch: int
    first: int = 0  # samples of the epoch before it


# (indices, shares of all ranks, this rank, where the batch is) -> what the data set gets; workers have it too
FetchAs = Callable[[list[Any], Sequence[int], int, Place], list[Any]]


class Task(NamedTuple):
    """One batch to fetch."""

    number: int  # in the table of shares; -1: they are known
    shares: tuple[int, ...]
    indices: list[Any]  # of the global batch; where shares are known, of this rank, or of the dummy samples
    rank: int
    dummies: int  # samples of a rank without any
    place: Place


class Loaded(NamedTuple):
    """A tuple: workers send it, and pinning goes through it."""

    batch: Any
    seconds: float  # that fetching and collating took


class ShareSamples(Dataset):
    """Workers have copies of it. A rank without samples gets the first of the batch: those of another batch may take another way
    through the model, and give gradients to parameters that nobody's samples have reached."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], table: ShareTable | None, number: int | None = None
    ) -> None:
        """number: of the loader, by which its samples have random numbers of their own; None: they have those of their process."""
        self.dataset, self._collate, self._table = dataset, collate, table
        self.fetch_as: FetchAs | None = None
        self._length: int | None = None
        whose = collate.collate if isinstance(collate, CollateReadable) else collate
        several = hasattr(dataset, "__getitems__")
        self._randoms = None if number is None else SampleRandoms(number, several, whose)

    @property
    def collating_draws(self) -> bool:
        """Random numbers, as far as was seen."""
        return self._randoms is not None and self._randoms.collating_draws

    def epoch_begins(self) -> None:
        """A worker's copy, whose data set may be another by now, has begun with an earlier one."""
        self._length = _length(self.dataset)

    def __getitem__(self, task: Task) -> Loaded:
        try:
            return self._load(task)
        except IndexError as error:
            self._say_what_changed(error)
            raise

    def _say_what_changed(self, error: IndexError) -> None:
        """Where the data set has become shorter since the epoch began, whose samples were drawn then."""
        now = _length(self.dataset)
        if get_worker_info() is None and len(error.args) < 2 and now is not None and now < (self._length or 0):
            error.args = (
                f"{error}\n  fix: the data set had {self._length} samples when the epoch began, and has {now} now: let it become "
                "shorter between two epochs",
            )

    def _load(self, task: Task) -> Loaded:
        shares: Sequence[int] = task.shares
        mine = task.indices
        if task.number >= 0:
            assert self._table is not None
            shares = self._table.wait(task.number)
            mine = part(mine, shares, task.rank, task.dummies)
        start = time.perf_counter()
        if self.fetch_as is not None:
            batch = self._collate(self._fetch(self.fetch_as(mine, shares, task.rank, task.place)))
        elif self._randoms is None:
            batch = self._collate(self._fetch(mine))
        else:
            before = sum(shares[: task.rank]) if shares[task.rank] else 0
            where = Where(task.place.seed, task.place.epoch, task.place.first + before)
            batch = self._randoms.load(mine, where, self._read(), lambda: self._fetch(mine), self._whole)
        return Loaded(batch, time.perf_counter() - start)

    def _fetch(self, indices: list[Any]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[index] for index in indices]

    def _read(self) -> Callable[[Any], Any]:
        """What gives one sample as _fetch gives several."""
        if isinstance(self.dataset, ReadableSamples):
            return self.dataset.read
        dataset, many = self.dataset, getattr(self.dataset, "__getitems__", None)
        return (lambda index: dataset[index]) if many is None else (lambda index: many([index])[0])

    def _whole(self, samples: Any) -> Any:
        found = self.dataset.whole(samples) if isinstance(self.dataset, ReadableSamples) else samples
        return self._collate(found)


def _length(dataset: Any) -> int | None:
    """None: it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def part(indices: list[Any], shares: Sequence[int], rank: int, dummies: int) -> list[Any]:
    """A rank's of a global batch."""
    first = sum(shares[:rank])
    return indices[first : first + shares[rank]] or indices[:dummies]
