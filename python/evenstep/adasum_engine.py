"""Adasum: gradients added up by how far they point one way (docs/compression.md)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep import _core
from evenstep.gathering_engine import GatheringEngine


class AdasumEngine(GatheringEngine):
    """Adasum (Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, section 3) of each
    parameter's gradient: of pairs of ranks, then of pairs of these. Each rank brings ranks * weight * gradient: where all
    point one way the result is their weighted mean, where they are orthogonal it is `ranks` times that.

    What is left over of an odd number goes up by itself, and a sum counts with the ranks that are in it: of a of m ranks and
    b of n it is (1 - m / (m + n) a·b / |a|²) a + (1 - n / (m + n) a·b / |b|²) b, the paper's (3) where m = n."""

    _encoded = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

    def _combine(self, number: int, flat: torch.Tensor) -> int:
        wide = torch.promote_types(flat.dtype, torch.float32)
        mine = (flat.to(wide) * self._exchange.ranks).view(torch.uint8)
        values = [row.view(wide) for row in self._exchange.gather(mine)]
        counts = [self.views[index].numel() for index in self._buckets[number].indices]
        ranks = [1] * len(values)
        while len(values) > 1:
            values, ranks = self._level(values, ranks, counts)
        flat.copy_(values[0])
        return self._gathered_bytes(mine)

    def _level(
        self, values: list[torch.Tensor], ranks: list[int], counts: list[int]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Pairs of neighbours; the factors are rank 0's, since a dot product's last bits depend on the threads."""
        pairs = list(zip(values[::2], values[1::2], ranks[::2], ranks[1::2]))
        factors = torch.stack([_factors(a, b, m / (m + n), counts) for a, b, m, n in pairs]).cpu().contiguous()
        self._group.broadcast_(factors)
        self._met_ns = _core.clock_ns()
        sizes = torch.tensor(counts, device=values[0].device)
        merged, together = [], []
        for (a, b, m, n), factor in zip(pairs, factors.to(values[0].device, values[0].dtype)):
            of_a, of_b = (one.repeat_interleave(sizes) for one in factor)
            merged.append(of_a * a + of_b * b)
            together.append(m + n)
        odd = len(values) % 2
        return [*merged, *values[len(values) - odd :]], [*together, *ranks[len(ranks) - odd :]]


def _factors(a: torch.Tensor, b: torch.Tensor, part: float, counts: Sequence[int]) -> torch.Tensor:
    """1 - part a·b / |a|² and 1 - (1 - part) a·b / |b|² of each parameter; a factor of what is zero is 1."""
    rows = []
    for x, y in zip(a.double().split(counts), b.double().split(counts)):  # type: ignore[arg-type]
        both, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
        of_x = 1 - part * both / xx if xx > 0 else xx + 1
        rows.append(torch.stack([of_x, 1 - (1 - part) * both / yy if yy > 0 else yy + 1]))
    return torch.stack(rows, 1)
