"""es.balance: the best split of a batch, by times that are known."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep import _core


def balance(
    tables: Sequence[Sequence[tuple[int, float]]],
    batch: int,
    *,
    caps: Sequence[int | None] | None = None,
    constant_seconds: Sequence[float] | None = None,
    buckets: Sequence[int | None] | None = None,
    micro_batches: Sequence[int | None] | None = None,
) -> tuple[list[int], float]:
    """The whole numbers of samples, one a rank and `batch` together, whose slowest rank is done soonest; and when that is.

    tables: of each rank, seconds for some numbers of samples, rising: [(16, 0.020), (32, 0.036)]. Between them times are
    straight lines, beyond the last the last line goes on; of one pair alone a line through (0, 0). It is the optimum, also
    with shares of zero, and takes less than a millisecond for a thousand ranks (docs/balancing.md#the-split).

    One entry a rank, None for none: caps, its most samples; constant_seconds, of each step whatever its share (0.0: none);
    buckets, it takes as long as for the next multiple of so many; micro_batches, the most that it runs at once: `tables` are
    times of one of these then.

    Raises evenstep.EvenstepError where a table is no such table, or the caps do not hold the batch; ValueError where there is
    no such cap, bucket or micro-batch.
    """
    _check_least("caps", caps, 0)
    _check_least("buckets", buckets, 1)
    _check_least("micro_batches", micro_batches, 1)
    return _core.balance(tables, batch, caps, constant_seconds, buckets, micro_batches)


def _check_least(name: str, numbers: Sequence[int | None] | None, least: int) -> None:
    """Below these the solver takes a number for none, which nobody means by -1 samples."""
    for rank, number in enumerate(numbers or ()):
        if number is not None and number < least:
            raise ValueError(f"es.balance({name}=…): rank {rank} has {number}; give {least} or more, None for none")
