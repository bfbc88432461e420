"""What the engines have in common that work when backward has ended: Adasum, PowerSGD and, where the engine in C is not used,
int8, onebit and topk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evenstep import _core
from evenstep.bucket_engine import Buckets
from evenstep.engine import EngineOptions, Report
from evenstep.exchange import Exchange, TorchExchange
from evenstep.group import Group
from evenstep.group_end import raise_instead

if TYPE_CHECKING:
    from evenstep.group import Bootstrap

GATHERED_BUCKET_BYTES = 25 << 20
"""Nothing begins before backward has ended, so that few calls are worth more."""


def all_finite(flats: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Whether all values of these buckets are, by one look at each."""
    real = (torch.view_as_real(flat) if flat.is_complex() else flat for _, flat in flats if flat.numel() > 0)
    return all(bool(torch.stack(one.aminmax()).isfinite().all()) for one in real)


class GatheringEngine(Buckets):
    """Flats of the types that are encoded go to `_combine`, one after the other; the others are all-reduced."""

    _encoded: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    feedback_counts_as_mean = False  # whether what is still to come is the mean of the ranks' leftovers; else their sum

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, options)
        self._exchange, self._group, self._telemetry = exchange, group, telemetry
        self._used = b""  # in this round, by some rank
        self._met_ns = 0  # when this rank last met the others, but for what the exchange knows of

    def _lay_out(self, order: Sequence[int], late: Sequence[int]) -> None:
        """Those of a kind one after the other: what is left out is kept by the numbers of buckets."""
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index in order:
            kinds.setdefault((self._parameters[index].device, self._parameters[index].dtype), []).append(index)
        super()._lay_out([index for indices in kinds.values() for index in indices], late)

    def _limit(self, device: torch.device, dtype: torch.dtype) -> int:
        return self._options.bucket_limit(dtype.itemsize, GATHERED_BUCKET_BYTES)

    # -- where ranks may be lost --

    @property
    def plain(self) -> bool:
        """Whether all parameters, and what adds them up, are in the host's memory."""
        return self._exchange.lasts and all(p.is_cpu for p in self._parameters)

    @property
    def over_torch(self) -> bool:
        """Whether a process group of torch's adds up."""
        return isinstance(self._exchange, TorchExchange)

    def meet_again(self, bootstrap: Bootstrap) -> Exchange:
        """By which another one for the same parameters adds up. Collective."""
        return self._exchange.meet_again(bootstrap)

    def revoke(self) -> None:
        """Ends what the other ranks wait for."""
        self._exchange.revoke()

    def again(self, exchange: Exchange) -> GatheringEngine:
        """Another one for the same parameters; this one has ended, whatever round was open."""
        self._exchange.leave()
        return type(self)(self._parameters, exchange, self._group, self._telemetry, self._options)

    # -- a round --

    @torch.no_grad()
    def finish(self) -> tuple[Sequence[int], Report]:
        start = _core.clock_ns()
        used = self._used = self.used_anywhere(self._group)
        self._met_ns = _core.clock_ns()
        flats = []
        for number, bucket in enumerate(self._buckets):
            self._fill_up(bucket)
            if any(used[index] for index in bucket.indices):
                flats.append((number, bucket.flat))
        try:
            moved, full = self._reduce(flats)
        except RuntimeError as error:
            if isinstance(self._exchange, TorchExchange):
                raise_instead(self._exchange.failed(self._group, error), error)
            raise
        now = _core.clock_ns()
        own = now - max(self._met_ns, self._exchange.met_ns)
        self._telemetry.span(_core.SPAN_COMMUNICATION, self._step, start, now - start, moved)
        return used, Report(now - start, 0, now - start, moved, full, own)

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        """flat = its sum over ranks; the bytes that travel, and those of the gradients."""
        moved = full = self._all_reduce([flat for _, flat in flats if flat.dtype not in self._encoded])
        for number, flat in flats:
            if flat.dtype not in self._encoded or flat.numel() == 0:
                continue
            full += flat.numel() * flat.element_size()
            moved += self._combine(number, flat)
        return moved, full

    def _all_reduce(self, flats: Sequence[torch.Tensor]) -> int:
        """How many bytes they are."""
        for work in [self._exchange.all_reduce(flat) for flat in flats]:
            if work is not None:
                work.wait()
                self._met_ns = _core.clock_ns()
        return sum(flat.numel() * flat.element_size() for flat in flats)

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        """flat = what all ranks have then, for bucket `number`. The bytes that travel, as those of an all-reduce count: a
        rank sends 2 (n - 1) / n of these, but n - 1 times what it sends to every other."""
        raise NotImplementedError

    def _unused(self, number: int) -> list[slice]:
        """Where in the bucket parameters lie that no rank has a gradient for: what is sent for them arrives nowhere."""
        at, found = 0, []
        for index in self._buckets[number].indices:
            end = at + self.views[index].numel()
            if not self._used[index]:
                found.append(slice(at, end))
            at = end
        return found

    def _gathered_bytes(self, payload: torch.Tensor) -> int:
        return payload.numel() * self._exchange.ranks // 2
