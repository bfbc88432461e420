"""Engines that work when backward has ended: PowerSGD by torch's hook; Adasum; and, where the engine in C is not used (on
accelerators, over torch's collectives), int8, onebit and topk. fp32 and 16-bit gradients are encoded; others travel as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenstep import _core
from evenstep.compression import encoding_of, in_parts
from evenstep.encoded_engine import Leftovers
from evenstep.engine import EngineOptions, TorchEngine
from evenstep.exchange import Exchange, TorchExchange
from evenstep.group import Group


def all_finite(flats: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Whether all values of these buckets are, by one look at each."""
    real = (torch.view_as_real(flat) if flat.is_complex() else flat for _, flat in flats if flat.numel() > 0)
    return all(bool(torch.stack(one.aminmax()).isfinite().all()) for one in real)


class _Gathering(TorchEngine):
    """Flats of the types that are encoded go to `_combine`, one after the other; the others are all-reduced."""

    _encoded: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    feedback_counts_as_mean = False  # whether what is still to come is the mean of the ranks' leftovers; else their sum

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        moved, full = super()._reduce([one for one in flats if one[1].dtype not in self._encoded])
        for number, flat in flats:
            if flat.dtype not in self._encoded or flat.numel() == 0:
                continue
            full += flat.numel() * flat.element_size()
            moved += self._combine(number, flat)
        return moved, full

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        """flat = what all ranks have then, for bucket `number`. The bytes that travel, as those of an all-reduce count: a
        rank sends 2 (n - 1) / n of these, but n - 1 times what it sends to every other."""
        raise NotImplementedError

    def _unused(self, number: int) -> list[slice]:
        """Where in the bucket parameters lie that no rank has a gradient for: what is sent for them arrives nowhere."""
        at, found = 0, []
        for index in self._buckets[number][1]:
            end = at + self.views[index].numel()
            if not self._used[index]:
                found.append(slice(at, end))
            at = end
        return found

    def _gathered_bytes(self, payload: torch.Tensor) -> int:
        return payload.numel() * self._exchange.ranks // 2


class CompressedEngine(Leftovers, _Gathering):
    """sum over ranks, in their order, of what each has encoded; with error feedback where the encoding wants it. In parts,
    each rank adds up one of them and encodes the sum again. To the last bit what the engine in C makes of the same buckets
    on CPUs (include/evenstep/sync.h); this one is for accelerators, and for what torch's collectives alone connect."""

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
        self._left_out: dict[int, torch.Tensor] = {}  # of each bucket, in fp32
        self._left_of_sums: dict[int, torch.Tensor] = {}  # of this rank's part of each bucket
        self._new: dict[int, torch.Tensor] = {}  # the same, of the round under way
        self._new_of_sums: dict[int, torch.Tensor] = {}
        self._round = (-1, 0)  # the step, and which round of it
        self._lies = {}  # each parameter's bucket, and where in it
        for number, (_, indices) in enumerate(self._buckets):
            at = 0
            for index in indices:
                self._lies[index] = number, at
                at += self.views[index].numel()

    def begin(self, weight: float, step: int) -> None:
        super().begin(weight, step)
        last, count = self._round
        self._round = (step, count + 1 if last == step else 0)

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        costs = super()._reduce(flats)
        if self._new and all_finite(flats):  # the same bits on all ranks
            self._left_out.update(self._new)
            self._left_of_sums.update(self._new_of_sums)
        # else a GradScaler skips the step on every rank, and nothing that was sent is used: what was left out before stays
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
        encoding, rank = self._encoding, self._group.rank
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
        sums = torch.zeros(part.stop - part.start, device=self._buckets[number][0].device)
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
        for one in (self._group.rank, *self._round, number, *([part] if part else [])):
            seed = (seed * 1_000_003 + one) & 0x7FFFFFFFFFFFFFFF
        return seed

    def left_out(self, index: int, of_sums: bool) -> tuple[torch.Tensor, int] | None:
        number, at = self._lies[index]
        flat, end = self._buckets[number][0], at + self.views[index].numel()
        if not self._encoding.feedback or flat.dtype not in self._encoded or at == end:
            return None
        if not of_sums:
            left = self._left_out.setdefault(number, torch.zeros(flat.numel(), device=flat.device))
            return left[at:end], 0
        if not in_parts(self._way, self._exchange.ranks, self._encoding.bytes(flat.numel())):
            return None
        part = self._parts(flat.numel())[self._group.rank]
        start, stop = max(at, part.start), min(end, part.stop)
        if start >= stop:
            return None
        sums = self._left_of_sums.setdefault(number, torch.zeros(part.stop - part.start, device=flat.device))
        return sums[start - part.start : stop - part.start], start - at

    def forget(self) -> None:
        self._left_out.clear()
        self._left_of_sums.clear()
        self._round = (-1, 0)


def _fill(values: torch.Tensor, parts: Sequence[slice], source: torch.Tensor | None) -> None:
    """These parts of values become those of source, or zeros."""
    for part in parts:
        values[part] = source[part] if source is not None else 0.0


class _Bucket:
    """What torch's hook asks a bucket of DistributedDataParallel for."""

    def __init__(self, number: int, last: bool, flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        self._number, self._last, self._flat, self._gradients = number, last, flat, gradients

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


class PowerSGDEngine(_Gathering):
    """Low-rank factors by torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook, whose first steps are a plain
    all-reduce. The hook gives means over ranks, so each brings ranks * weight * gradient."""

    PLAIN_STEPS = 10
    feedback_counts_as_mean = True

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        exchange: TorchExchange,
        group: Group,
        telemetry: _core.Telemetry,
        options: EngineOptions,
    ) -> None:
        super().__init__(parameters, exchange, group, telemetry, options)
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

        assert options.compression is not None
        self._hook: Any = hooks.powerSGD_hook
        self._shapes = [tuple(p.shape) or (1,) for p in parameters]
        self._last = len(self._buckets) - 1
        self._seed = options.seed & 0x7FFFFFFF
        self.state = hooks.PowerSGDState(
            exchange.process_group,
            matrix_approximation_rank=int(options.compression.number),
            start_powerSGD_iter=self.PLAIN_STEPS,
            orthogonalization_epsilon=1e-8,
            random_seed=self._seed,
        )

    def _reduce(self, flats: Sequence[tuple[int, torch.Tensor]]) -> tuple[int, int]:
        encoded = [number for number, flat in flats if flat.dtype in self._encoded and flat.numel() > 0]
        self._last = max(encoded, default=-1)
        before = self._memory()
        costs = super()._reduce(flats)
        if encoded and not all(map(any, self._group.exchange(bytes([all_finite(flats)])))):
            self._put_back(*before)  # a GradScaler skips the step; what is not finite would stay in every later one
        return costs

    def _memory(self) -> tuple[Any, ...]:
        """What the hook keeps between steps. It writes into the factors, and makes new errors."""
        state = self.state
        factors = ({n: one.clone() for n, one in kept.items()} for kept in (state.p_memory_dict, state.q_memory_dict))
        return state.iter, dict(state.error_dict), *factors, state.rng.get_state()

    def _put_back(self, steps: int, errors: Any, p: Any, q: Any, rng: Any) -> None:
        state = self.state
        state.iter, state.error_dict, state.p_memory_dict, state.q_memory_dict = steps, errors, p, q
        state.rng.set_state(rng)

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        state, size = self.state, flat.element_size()
        gradients, at = [], 0
        for index in self._buckets[number][1]:
            count = self.views[index].numel()
            if count:
                gradients.append(flat[at : at + count].view(self._shapes[index]))
            at += count
        plain = state.iter < state.start_powerSGD_iter
        before = state.total_numel_after_compression
        left = state.error_dict.get(number)
        flat.mul_(self._exchange.ranks)
        result = self._hook(state, _Bucket(number, number == self._last, flat, gradients)).wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)
        if not plain:
            for part in self._unused(number):
                state.error_dict[number][part] = left[part] if left is not None else 0.0
        return (flat.numel() if plain else int(state.total_numel_after_compression - before)) * size

    def feedback_state(self) -> dict[str, torch.Tensor]:
        state = {str(number): error for number, error in self.state.error_dict.items()}
        for name, memory in (("p", self.state.p_memory_dict), ("q", self.state.q_memory_dict)):
            state.update({f"{name}{number}": values for number, values in memory.items()})
        state["iter"] = torch.tensor(self.state.iter)
        return state

    def load_feedback(self, state: dict[str, torch.Tensor]) -> None:
        for kept in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            kept.clear()
        self.state.iter = int(state.get("iter", 0))
        for number, (flat, _) in enumerate(self._buckets):
            if str(number) in state and state[str(number)].numel() == flat.numel():
                self.state.error_dict[number] = state[str(number)].to(flat.device, flat.dtype, copy=True)
                if f"p{number}" in state:
                    self.state.p_memory_dict[number] = state[f"p{number}"].to(flat.device, flat.dtype, copy=True)
                    self.state.q_memory_dict[number] = state[f"q{number}"].to(flat.device, flat.dtype, copy=True)
        self.state.rng.seed(self._seed)
        for _ in self.state.q_memory_dict:  # each has drawn its first factors from a seed of its own
            self.state.rng.randint(1_000_000_000)


class AdasumEngine(_Gathering):
    """Adasum (Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, section 3) of each
    parameter's gradient: of pairs of ranks, then of pairs of these. Each rank brings ranks * weight * gradient: where all
    point one way the result is their weighted mean, where they are orthogonal it is `ranks` times that."""

    _encoded = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        wide = torch.promote_types(flat.dtype, torch.float32)
        mine = (flat.to(wide) * self._exchange.ranks).view(torch.uint8)
        values = [row.view(wide) for row in self._exchange.gather(mine)]
        counts = [self.views[index].numel() for index in self._buckets[number][1]]
        while len(values) > 1:
            values = self._level(values, counts)
        flat.copy_(values[0])
        return self._gathered_bytes(mine)

    def _level(self, values: list[torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
        """Pairs of neighbours; the factors are rank 0's, since a dot product's last bits depend on the threads."""
        pairs = list(zip(values[::2], values[1::2]))
        factors = torch.stack([_factors(a, b, counts) for a, b in pairs]).cpu().contiguous()
        self._group.broadcast_(factors)
        sizes = torch.tensor(counts, device=values[0].device)
        merged = []
        for (a, b), factor in zip(pairs, factors.to(values[0].device, values[0].dtype)):
            of_a, of_b = (one.repeat_interleave(sizes) for one in factor)
            merged.append(of_a * a + of_b * b)
        return merged


def _factors(a: torch.Tensor, b: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """1 - a·b / (2 |a|²) and 1 - a·b / (2 |b|²) of each parameter; a factor of what is zero is 1."""
    rows = []
    for x, y in zip(a.double().split(counts), b.double().split(counts)):
        both, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
        rows.append(torch.stack([1 - both / (2 * xx) if xx > 0 else xx + 1, 1 - both / (2 * yy) if yy > 0 else yy + 1]))
    return torch.stack(rows, 1)
