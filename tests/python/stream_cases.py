"""Streams of the tests of IterableDatasets: numbers from 0 on, in one or several workers, that resume in different ways."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import evenstep as es


class Numbers(IterableDataset):
    """0 … count - 1, each worker its part: worker 0 has more."""

    def __init__(self, count: int, shuffled: bool = False) -> None:
        self.count, self.shuffled = count, shuffled
        self.part: tuple[int, int] | None = None  # set by `own_part` in the workers
        self.epoch = 0

    def bounds(self) -> tuple[int, int]:
        info = get_worker_info()
        if self.part is not None:
            return self.part
        if info is None:
            return 0, self.count
        assert info.dataset is self
        cuts = [0, *(self.count * (2 + w) // (2 * info.num_workers) for w in range(info.num_workers - 1)), self.count]
        return cuts[info.id], cuts[info.id + 1]

    def numbers(self) -> Iterator[int]:
        buffer: list[int] = []
        for number in range(*self.bounds()):
            if not self.shuffled:
                yield number
                continue
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        while buffer:
            yield buffer.pop(random.randrange(len(buffer)))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)], dtype=torch.float64) for number in self.numbers())


def own_part(worker: int) -> None:
    """A worker_init_fn, as torch's documentation has it."""
    info = get_worker_info()
    each = -(-info.dataset.count // info.num_workers)
    info.dataset.part = (worker * each, min((worker + 1) * each, info.dataset.count))


class Stateful(Numbers):
    """Resumes by its own state, and counts what it gives."""

    given = 0

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0
        self.resume: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "tensor": torch.tensor([self.at])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["at"] == int(state["tensor"])
        self.resume = state["at"]

    def numbers(self) -> Iterator[int]:
        first, last = self.bounds()
        self.at = first if self.resume is None else self.resume
        self.resume = None
        while self.at < last:
            self.at += 1
            Stateful.given += 1
            yield self.at - 1


class Skipping(Numbers):
    """Its iterator passes over what others have."""

    drawn = 0

    def __iter__(self) -> Any:
        return _SkippingIterator(super().__iter__())


class _SkippingIterator:
    def __init__(self, inner: Iterator[torch.Tensor]) -> None:
        self.inner = inner

    def __iter__(self) -> _SkippingIterator:
        return self

    def __next__(self) -> torch.Tensor:
        value = next(self.inner)
        Skipping.drawn += 1
        return value

    def skip(self, count: int) -> int:
        return sum(1 for _ in islice(self.inner, count))


def plain(data: IterableDataset, **options: Any) -> list[list[float]]:
    """The batches of one device."""
    return [batch.reshape(-1).tolist() for batch in DataLoader(data, **options)]


def part(batch: torch.Tensor) -> list[float]:
    """This rank's samples of the loop's batch."""
    plan = es.session().latest
    assert plan is not None
    return batch.reshape(-1).tolist() if plan.samples else []


def parts(loader: Any) -> list[list[float]]:
    return [part(batch) for batch in loader]


def joined(mine: list[list[float]]) -> list[list[float]]:
    """The global batches of all ranks' parts. Collective."""
    everybody = [json.loads(one) for one in es.session().all_gather_bytes(json.dumps(mine).encode())]
    assert len({len(one) for one in everybody}) == 1, everybody
    return [[x for one in batch for x in one] for batch in zip(*everybody)]


def uneven(ranks: int) -> Any:
    """A schedule of shares that differ from batch to batch, zeros among them."""

    def shares(number: int, batch: int) -> list[int]:
        draw = random.Random(number)
        cuts = sorted(draw.randint(0, batch) for _ in range(ranks - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, batch])]

    return shares
