"""Gradients in flat buckets on their own device, packed the moment they are there; and, of engines that exchange them while
backward goes on, the one order in which buckets are handed on, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.engine import EngineOptions, Report, memory_format_of
from evenstep.group import Group

BUCKET_BYTES = 4 << 20


class Bucket:
    """Parameters (their numbers) that lie in `flat` one after the other."""

    def __init__(self, indices: list[int], flat: torch.Tensor) -> None:
        self.indices, self.flat = indices, flat

    @property
    def bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Buckets:
    """The memory of all of them, and weight * gradient in it."""

    def __init__(self, parameters: Sequence[torch.Tensor], options: EngineOptions) -> None:
        self._parameters = parameters
        self._options = options
        self._weight, self._step = 0.0, 0
        self._have = bytearray(len(parameters))  # which gradients this rank has in this round
        self.views = [torch.empty(0)] * len(parameters)
        self._lay_out(list(reversed(range(len(parameters)))), [])

    def _lay_out(self, order: Sequence[int], late: Sequence[int]) -> None:
        """A bucket is complete with its last parameter: they stand in the order of these."""
        self._buckets: list[Bucket] = []
        for part in (order, late):
            filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            full: list[list[int]] = []
            for index in part:
                kind = self._parameters[index].device, self._parameters[index].dtype
                indices = filling.setdefault(kind, [])
                if indices and sum(self._bytes(one) for one in (*indices, index)) > self._limit(*kind):
                    full.append(indices)
                    indices = filling[kind] = []
                indices.append(index)
            place = {index: number for number, index in enumerate(part)}
            for indices in sorted((*full, *filling.values()), key=lambda one: place[one[-1]]):
                self._add(indices)

    def _limit(self, device: torch.device, dtype: torch.dtype) -> int:
        """Of the bytes of a bucket of such parameters."""
        return self._options.bucket_limit(dtype.itemsize, BUCKET_BYTES)

    def _bytes(self, index: int) -> int:
        return self._parameters[index].numel() * self._parameters[index].element_size()

    def _add(self, indices: list[int]) -> None:
        first = self._parameters[indices[0]]
        counts = [self._parameters[index].numel() for index in indices]
        flat = torch.zeros(sum(counts), dtype=first.dtype, device=first.device)
        at = 0
        for index, count in zip(indices, counts):
            shape, stride = memory_format_of(self._parameters[index])
            self.views[index] = flat[at : at + count].as_strided(shape, stride)
            at += count
        self._buckets.append(Bucket(indices, flat))

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def begin(self, weight: float, step: int) -> None:
        self._weight, self._step = weight, step
        self._have = bytearray(len(self._parameters))

    @torch.no_grad()
    def ready(self, index: int, gradient: torch.Tensor) -> None:
        self._pack(index, gradient)
        self._have[index] = 1

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        view = self.views[index]
        if self._weight == 0.0:
            view.zero_()
        elif gradient is view:
            view.mul_(self._weight)
        else:
            torch.mul(gradient, self._weight, out=view)

    def _fill_up(self, bucket: Bucket) -> None:
        """What this rank has no gradient of."""
        for index in bucket.indices:
            if not self._have[index]:
                self._leave_out(index)

    def _leave_out(self, index: int) -> None:
        self.views[index].zero_()

    def used_anywhere(self, group: Group) -> bytes:
        """Which parameters some rank has a gradient of in this round. Collective over all ranks."""
        return bytes(map(max, zip(*group.exchange(bytes(self._have))))) if self._have else b""


class BucketEngine(Buckets):
    """Buckets are handed on each when it and all before it are complete, and what is missing, at the end, as zeros."""

    def __init__(self, parameters: Sequence[torch.Tensor], options: EngineOptions) -> None:
        super().__init__(parameters, options)
        self._missing: list[int] = []
        self._next = 0

    def _lay_out(self, order: Sequence[int], late: Sequence[int]) -> None:
        super()._lay_out(order, late)
        self._bucket_of = {index: number for number, one in enumerate(self._buckets) for index in one.indices}

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        """Between rounds, as SharedEngine.reorder: the views are other memory then."""
        self._lay_out(order, late)
        return True

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        self._missing = [len(bucket.indices) for bucket in self._buckets]
        self._next = 0

    @torch.no_grad()
    def ready(self, index: int, gradient: torch.Tensor) -> None:
        super().ready(index, gradient)
        self._missing[self._bucket_of[index]] -= 1
        self._hand_on_complete()

    def _hand_on_complete(self, closing: bool = False) -> None:
        while self._next < len(self._buckets) and (closing or self._missing[self._next] == 0):
            bucket = self._buckets[self._next]
            if self._missing[self._next]:
                self._fill_up(bucket)
            self._next += 1
            self._hand_on(self._next - 1, bucket)

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        """The bucket is packed: its sum is formed from here on, the caller does not wait."""
        raise NotImplementedError

    def finish(self) -> tuple[Sequence[int], Report]:
        raise NotImplementedError
