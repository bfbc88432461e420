"""What the inner loader fetches from: the data set of which each task takes this rank's share of a global batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from evenstep.share_table import ShareTable


class Place(NamedTuple):
    """Of a global batch."""

    seed: int  # of the loader
    epoch: int
    batch: int


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

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], table: ShareTable | None) -> None:
        self.dataset, self._collate, self._table = dataset, collate, table
        self.fetch_as: FetchAs | None = None

    def __getitem__(self, task: Task) -> Loaded:
        shares: Sequence[int] = task.shares
        mine = task.indices
        if task.number >= 0:
            assert self._table is not None
            shares = self._table.wait(task.number)
            mine = part(mine, shares, task.rank, task.dummies)
        start = time.perf_counter()
        if self.fetch_as is not None:
            mine = self.fetch_as(mine, shares, task.rank, task.place)
        batch = self._collate(self._fetch(mine))
        return Loaded(batch, time.perf_counter() - start)

    def _fetch(self, indices: list[Any]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[index] for index in indices]


def part(indices: list[Any], shares: Sequence[int], rank: int, dummies: int) -> list[Any]:
    """A rank's of a global batch."""
    first = sum(shares[:rank])
    return indices[first : first + shares[rank]] or indices[:dummies]
