"""Whether a planned job's steps are shorter without some of its ranks: one rank that is left exchanges nothing, and nobody waits
for the dummy samples of ranks that have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evenstep._core import balance


def without_ranks(
    models: Sequence[Sequence[tuple[int, float]]],
    busy: Sequence[Callable[[int], float]],
    batch: int,
    caps: Sequence[int | None],
    buckets: Sequence[int | None],
    *,
    overhead: float,
    together: float,
    least: float,
) -> tuple[list[int], float] | None:
    """(ranks to leave out, seconds of a step without them) where a step is shorter so by more than `least` seconds, else None.

    models, busy: each rank's times as the solver takes them, and as a function of its samples. overhead: seconds of a step beside
    the slowest rank's work, with all. together: seconds of a step with all. Ranks are left out one after the other, of those that
    are slowest the one without which a step is shortest; of two ways that differ by less than `least` the one that keeps more is
    taken. The ranks that stay are taken to be as fast as with the others beside them.
    """

    def step_of(kept: list[int]) -> float:
        held: list[Any] = [caps[rank] for rank in kept]
        if None not in held and sum(held) < batch:
            return math.inf
        shares, _ = balance([models[rank] for rank in kept], batch, held, buckets=[buckets[rank] for rank in kept])
        return max(busy[rank](share) for rank, share in zip(kept, shares)) + (overhead if len(kept) > 1 else 0.0)

    part = -(-batch // len(models))  # slow with many samples, with one, or with none at all
    kept = list(range(len(models)))
    best, shortest = kept, together
    while len(kept) > 1:
        slowest = {max(kept, key=lambda rank: (busy[rank](samples), rank)) for samples in (part, 1, 0)}
        ways = [[rank for rank in kept if rank != one] for one in sorted(slowest, reverse=True)]
        step, kept = min(((step_of(way), way) for way in ways), key=lambda pair: pair[0])
        if step < shortest - least:
            best, shortest = kept, step
    return None if len(best) == len(models) else ([rank for rank in range(len(models)) if rank not in best], shortest)
