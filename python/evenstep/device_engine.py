"""Gradients in flat buckets on their own device, each on its way to the other ranks as soon as it is complete, while
backward goes on: over a process group of torch whose collectives are asynchronous (our NCCL engine, or another)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.engine import EngineOptions, Report, memory_format_of
from evenstep.group import Group

BUCKET_BYTES = 4 << 20


class Bucket:
    """Parameters (their numbers) that lie in `flat` one after the other."""

    def __init__(self, indices: list[int], flat: torch.Tensor) -> None:
        self.indices, self.flat = indices, flat


class BucketEngine:
    """Packs weight * gradient into its bucket the moment it is there. Buckets are handed on in one order, the same on all
    ranks: each when it and all before it are complete, and what is missing, at the end, as zeros."""

    def __init__(self, parameters: Sequence[torch.Tensor], options: EngineOptions) -> None:
        self._parameters = parameters
        self._options = options
        self._weight, self._step = 0.0, 0
        self.views = [torch.empty(0)] * len(parameters)
        self._lay_out(list(reversed(range(len(parameters)))), [])

    def _lay_out(self, order: Sequence[int], late: Sequence[int]) -> None:
        """A bucket is complete with its last parameter: they stand in the order of these."""
        self._buckets: list[Bucket] = []
        for part in (order, late):
            filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index in part:
                parameter = self._parameters[index]
                limit = self._options.bucket_limit(parameter.element_size(), BUCKET_BYTES)
                indices = filling.setdefault((parameter.device, parameter.dtype), [])
                if indices and sum(self._bytes(one) for one in (*indices, index)) > limit:
                    self._add(indices)
                    indices = filling[(parameter.device, parameter.dtype)] = []
                indices.append(index)
            for indices in sorted(filling.values(), key=lambda one: part.index(one[-1])):
                self._add(indices)
        self._bucket_of = {index: number for number, one in enumerate(self._buckets) for index in one.indices}

    def _bytes(self, index: int) -> int:
        return self._parameters[index].numel() * self._parameters[index].element_size()

    def _add(self, indices: list[int]) -> None:
        first = self._parameters[indices[0]]
        counts = [self._parameters[index].numel() for index in indices]
        flat = torch.zeros(sum(counts), dtype=first.dtype, device=first.device)
        bucket = Bucket(indices, flat)
        at = 0
        for index, count in zip(indices, counts):
            shape, stride = memory_format_of(self._parameters[index])
            self.views[index] = flat[at : at + count].as_strided(shape, stride)
            at += count
        self._buckets.append(bucket)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        """Between rounds, as SharedEngine.reorder: the views are other memory then."""
        self._lay_out(order, late)
        return True

    def begin(self, weight: float, step: int) -> None:
        self._weight, self._step = weight, step
        self._have = bytearray(len(self._parameters))
        self._missing = [len(bucket.indices) for bucket in self._buckets]
        self._next = 0

    @torch.no_grad()
    def ready(self, index: int, gradient: torch.Tensor) -> None:
        self._pack(index, gradient)
        self._have[index] = 1
        self._missing[self._bucket_of[index]] -= 1
        self._hand_on_complete()

    def _pack(self, index: int, gradient: torch.Tensor) -> None:
        view = self.views[index]
        if self._weight == 0.0:
            view.zero_()
        elif gradient is view:
            view.mul_(self._weight)
        else:
            torch.mul(gradient, self._weight, out=view)

    def _leave_out(self, index: int) -> None:
        """This rank has no gradient of it."""
        self.views[index].zero_()

    def _hand_on_complete(self, closing: bool = False) -> None:
        while self._next < len(self._buckets) and (closing or self._missing[self._next] == 0):
            bucket = self._buckets[self._next]
            for index in bucket.indices if self._missing[self._next] else ():
                if not self._have[index]:
                    self._leave_out(index)
            self._hand_on(self._next, bucket)
            self._next += 1

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        """The bucket is packed: its sum is formed from here on, the caller does not wait."""
        raise NotImplementedError

    def finish(self) -> tuple[Sequence[int], Report]:
        raise NotImplementedError

    def used_anywhere(self, group: Group) -> bytes:
        """Collective over all ranks."""
        return bytes(map(max, zip(*group.exchange(bytes(self._have))))) if self._have else b""


class DeviceEngine(BucketEngine):
    """All ranks on devices whose collectives one process group has."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: Any,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, options)
        self._process_group, self._group, self._telemetry = process_group, group, telemetry
        self._works: list[Any] = []

    def _hand_on(self, number: int, bucket: Bucket) -> None:
        self._works.append(dist.all_reduce(bucket.flat, group=self._process_group, async_op=True))

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        used = self.used_anywhere(self._group)
        start = _core.clock_ns()
        self._hand_on_complete(closing=True)
        works, self._works = self._works, []
        for work in works:
            work.wait()
        took = _core.clock_ns() - start
        moved = sum(flat.numel() * flat.element_size() for flat in self.memory)
        self._telemetry.span(_core.SPAN_COMMUNICATION, self._step, start, took, moved)
        return used, Report(took, 0, took, moved)
