"""int8, onebit and topk where the engine in C is not used: on accelerators, over torch's collectives. fp32 and 16-bit gradients are
encoded; others travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from evenstep import _core, compression
from evenstep._core import EvenstepError
from evenstep.bucket_engine import Bucket
from evenstep.compression import encoding_of, in_parts
from evenstep.encoded_engine import Leftovers
from evenstep.engine import EngineOptions
from evenstep.exchange import Exchange, TorchExchange
from evenstep.gathering_engine import GatheringEngine, all_finite
from evenstep.generation_told import name
from evenstep.group import Group

_Both = tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]  # left out of gradients, and of sums


class CompressedEngine(Leftovers, GatheringEngine):
    """sum over ranks, in their order, of what each has encoded; with error feedback where the encoding wants it. In parts,
    each rank adds up one of them and encodes the sum again. To the last bit what the engine in C makes of the same buckets
    on CPUs (include/evenstep/sync.h); this one is for accelerators, and for what torch's collectives alone connect."""

    takes_back = False  # rounds may have to count nothing

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, exchange, group, telemetry, options)
        assert options.compression is not None
        self._encoding = encoding_of(options.compression)
        self._seed, self._way = options.seed, options.way
        self._rank = (
            group.rank
        )  # of the exchange; where a rank is lost, the group has another one before this engine ends
        self._left_out: dict[int, torch.Tensor] = {}  # of each bucket, in fp32
        self._left_of_sums: dict[int, torch.Tensor] = {}  # of this rank's part of each bucket
        self._new: dict[int, torch.Tensor] = {}  # the same, of the round under way
        self._new_of_sums: dict[int, torch.Tensor] = {}
        self._round = (-1, 0)  # the step, and which round of it
        self._counts = True  # the round under way
        self._discarded: _Both = ({}, {})  # of the last round
        self._before: _Both | None = None  # the first round since `stands`
        self._lies = {}  # each parameter's bucket, and where in it
        for number, bucket in enumerate(self._buckets):
            if bucket.flat.dtype in self._encoded:
                _check_size(bucket)
            at = 0
            for index in bucket.indices:
                self._lies[index] = number, at
                at += self.views[index].numel()

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        last, count = self._round
        self._round = (step, count + 1 if last == step else 0)
        self._counts = True
        self._discarded = {}, {}
        if self.takes_back and self._before is None:
            # No copy: what is kept is replaced, and written to by load_feedback alone, which begins with memory of its own.
            self._before = dict(self._left_out), dict(self._left_of_sums)

    def discard(self) -> None:
        self._counts = False

    def keep(self, indices: Iterable[int]) -> None:
        left, of_sums = self._discarded
        for index in indices:
            number, at = self._lies[index]
            if number in left:
                _keep(self._left_out, number, left[number], at, at + self.views[index].numel())
            if number in of_sums:
                start, stop = self._own_part(index)
                _keep(self._left_of_sums, number, of_sums[number], start, stop)

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        costs = super()._reduce(flats)
        if self._new and all_finite(flats):  # the same bits on all ranks
            if self._counts:
                self._left_out.update(self._new)
                self._left_of_sums.update(self._new_of_sums)
            else:
                self._discarded = dict(self._new), dict(self._new_of_sums)
        # else nothing that was sent is used (a GradScaler skips the step on every rank): what was left out before stays
        self._new.clear()
        self._new_of_sums.clear()
        return costs

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        values = flat.to(torch.float32, copy=True)
        left = self._left_out.get(number)
        unused = self._unused(number)
        if left is not None:
            values += left
            _fill(values, unused, None)
        total = flat.zero_() if flat.dtype is torch.float32 else torch.zeros_like(values)
        if in_parts(self._way, self._exchange.ranks, self._encoding.bytes(flat.numel())):
            moved = self._by_parts(number, values, total)
        else:
            moved = self._gathered(number, values, total)
        if total is not flat:
            flat.copy_(total)
        if self._encoding.feedback:
            _fill(values, unused, left)
            self._new[number] = values
        return moved

    def _gathered(self, number: int, values: torch.Tensor, total: torch.Tensor) -> int:
        """total += what all have sent; values -= what this rank has."""
        payload = self._encoding.encode(values, self._random_seed(number))
        for row in self._exchange.gather(payload):
            self._encoding.add(row, total)
        if self._encoding.feedback:
            self._encoding.add(payload, values, -1)
        return self._gathered_bytes(payload)

    def _by_parts(self, number: int, values: torch.Tensor, total: torch.Tensor) -> int:
        encoding, rank = self._encoding, self._rank
        parts = self._parts(values.numel())
        payloads = [
            encoding.encode(values[part], self._random_seed(number, owner + 1)) for owner, part in enumerate(parts)
        ]
        sizes = [one.numel() for one in payloads]
        sums = self._sum_of_part(number, parts[rank], self._exchange.swap(payloads, sizes[rank]))
        payload = encoding.encode(sums, self._random_seed(number, len(parts) + 1))
        for part, row in zip(parts, self._exchange.gather_parts(payload, sizes)):
            encoding.add(row.contiguous(), total[part])
        if encoding.feedback:
            encoding.add(payload, sums, -1)
            _fill(sums, self._unused_in(number, parts[rank]), self._left_of_sums.get(number))
            self._new_of_sums[number] = sums
            for part, one in zip(parts, payloads):
                encoding.add(one, values[part], -1)
        return sum(sizes)

    def _sum_of_part(self, number: int, part: slice, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = torch.zeros(part.stop - part.start, device=self._buckets[number].flat.device)
        for row in rows:
            self._encoding.add(row.contiguous(), sums)
        if number in self._left_of_sums:
            sums += self._left_of_sums[number]
            _fill(sums, self._unused_in(number, part), None)
        return sums

    def _parts(self, count: int) -> list[slice]:
        """Of so many values, those that each rank adds up: whole blocks."""
        block, ranks = self._encoding.BLOCK, self._exchange.ranks
        blocks = -(-count // block)
        ends = [min(blocks * rank // ranks * block, count) for rank in range(ranks + 1)]
        return [slice(begin, end) for begin, end in zip(ends, ends[1:])]

    def _unused_in(self, number: int, part: slice) -> list[slice]:
        """_unused, as places in the part."""
        cut = ((max(one.start, part.start), min(one.stop, part.stop)) for one in self._unused(number))
        return [slice(start - part.start, stop - part.start) for start, stop in cut if start < stop]

    def _random_seed(self, number: int, part: int = 0) -> int:
        seed = self._seed
        for one in (self._rank, *self._round, number, *([part] if part else [])):
            seed = (seed * 1_000_003 + one) & 0x7FFFFFFFFFFFFFFF
        return seed

    def left_out(self, index: int, of_sums: bool) -> tuple[torch.Tensor, int] | None:
        number, at = self._lies[index]
        flat, end = self._buckets[number].flat, at + self.views[index].numel()
        if not self._encoding.feedback or flat.dtype not in self._encoded or at == end:
            return None
        if not of_sums:
            left = self._left_out.setdefault(number, torch.zeros(flat.numel(), device=flat.device))
            return left[at:end], 0
        if not in_parts(self._way, self._exchange.ranks, self._encoding.bytes(flat.numel())):
            return None
        part = self._parts(flat.numel())[self._rank]
        start, stop = self._own_part(index)
        if start >= stop:
            return None
        sums = self._left_of_sums.setdefault(number, torch.zeros(part.stop - part.start, device=flat.device))
        return sums[start:stop], start + part.start - at

    def _own_part(self, index: int) -> tuple[int, int]:
        """Where a parameter begins and ends among the values of its bucket that this rank adds up; none where it ends first."""
        number, at = self._lies[index]
        part = self._parts(self._buckets[number].flat.numel())[self._rank]
        start, stop = max(at, part.start), min(at + self.views[index].numel(), part.stop)
        return start - part.start, stop - part.start

    def forget(self) -> None:
        self._left_out.clear()
        self._left_of_sums.clear()
        self._round = (-1, 0)

    # -- where ranks may be lost --

    @property
    def plain(self) -> bool:
        """Groups of ours have what `swap` takes only where they were made for it."""
        return isinstance(self._exchange, TorchExchange) and super().plain

    def stands(self) -> None:
        """The rounds since the last call count."""
        self._before = None

    def take_back(self) -> None:
        """They do not: what they had left out is as it was before."""
        if self._before is not None:
            self.forget()
            left, of_sums = self._before
            self._left_out.update(left)
            self._left_of_sums.update(of_sums)
        self._before = None

    def lost_with(self, ranks: Sequence[int]) -> str:
        if not self._encoding.feedback:
            return ""
        return f"what {self._options.compression} left out of the gradients of {name(ranks, '')} is lost"

    def again(self, exchange: Exchange) -> CompressedEngine:
        """Another one for the same parameters; what this rank has left out goes with it."""
        self.take_back()
        other = super().again(exchange)
        assert isinstance(other, CompressedEngine)
        other.takes_back = self.takes_back
        other.load_feedback(self.feedback_state())
        return other


def _check_size(bucket: Bucket) -> None:
    count, members = bucket.flat.numel(), len(bucket.indices)
    if count > compression.MOST_VALUES:
        raise EvenstepError(
            f"a bucket of {count} elements, of {members} parameters, cannot travel encoded: 2^31 - 1 are the most\n  fix: "
            + ("give a smaller bucket_cap_mb" if members > 1 else "train this model without compression, or in 16 bits")
        )


def _keep(kept: dict[int, torch.Tensor], number: int, left: torch.Tensor, start: int, stop: int) -> None:
    """Of a bucket, what was left out of its values from `start` to `stop`."""
    if start < stop:
        whole = kept[number].clone() if number in kept else torch.zeros_like(left)
        whole[start:stop] = left[start:stop]
        kept[number] = whole


def _fill(values: torch.Tensor, parts: Sequence[slice], source: torch.Tensor | None) -> None:
    """These parts of values become those of source, or zeros."""
    for part in parts:
        values[part] = source[part] if source is not None else 0.0
