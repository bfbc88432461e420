"""Global batches whose size changes within an epoch: the same samples in the same order, cut elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler


class SizedBatches(Sampler[list[Any]]):
    """In place of a BatchSampler. `sizes`: from which batch of the epoch on which size counts; it begins with batch 0."""

    def __init__(self, batches: BatchSampler) -> None:
        self.sampler, self.drop_last = batches.sampler, batches.drop_last
        self.sizes = [(0, int(batches.batch_size))]

    @property
    def batch_size(self) -> int:
        """The newest."""
        return self.sizes[-1][1]

    def change(self, batch: int, size: int) -> None:
        """From this batch of the epoch on."""
        self.sizes = [*(one for one in self.sizes if one[0] < batch), (batch, size)]

    def begin_epoch(self) -> None:
        self.sizes = [(0, self.batch_size)]

    def __iter__(self) -> Iterator[list[Any]]:
        sizes = list(self.sizes)
        samples = iter(self.sampler)
        number, size = 0, sizes[0][1]
        while True:
            if sizes and sizes[0][0] == number:
                size = sizes.pop(0)[1]
            batch = list(islice(samples, size))
            if len(batch) < size:
                if batch and not self.drop_last:
                    yield batch
                return
            yield batch
            number += 1

    def __len__(self) -> int:
        """Of the epoch under way, as far as sizes are known."""
        left, count = len(self.sampler), 0  # type: ignore[arg-type]
        for (begin, size), (end, _) in zip(self.sizes, [*self.sizes[1:], (None, 0)]):
            whole = left // size
            if end is not None and whole >= end - begin:
                count, left = count + end - begin, left - (end - begin) * size
                continue
            rest = left - whole * size
            return count + whole + (1 if rest and not self.drop_last else 0)
        return count
